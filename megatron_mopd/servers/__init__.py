"""The servers that a run starts: kept alive by a process of its own, at fixed URLs, and ended on every way out."""
