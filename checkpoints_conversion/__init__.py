"""Commands that convert checkpoints: `python -m checkpoints_conversion.NAME`."""
