"""Low-precision formats, and what they are applied to: the same in training, rollout and export."""
