"""Rollout engine and teacher scorer in the process of the driver, on transformers: the default, with no server."""
