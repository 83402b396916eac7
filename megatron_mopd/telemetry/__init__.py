"""What a run says of itself: metric registry, record, W&B and TensorBoard sinks, live display, summary and report."""
