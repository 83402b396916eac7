"""Step 5, UPDATE, on Megatron-Core: the only package that imports megatron.core and transformer_engine."""
