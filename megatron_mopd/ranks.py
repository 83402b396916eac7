"""Which rank of the torchrun job this process is, known before torch is imported. A process started alone is rank 0
of 1."""

from __future__ import annotations

import os


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))
