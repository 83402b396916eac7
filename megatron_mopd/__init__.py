"""Multi-teacher on-policy distillation on Megatron-Core."""
