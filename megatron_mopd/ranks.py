"""Which rank of the torchrun job this process is, known before torch is imported. A process started alone is rank 0
of 1."""

from __future__ import annotations

import os
import threading
import time

LAUNCHER_CHECK_S = 0.5
LAUNCHER = "MOPD_LAUNCHER"
"""Where launch.py says its process id: it may be gone before a rank has come as far as to look for its parent."""


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def end_with_launcher() -> None:
    """Make this rank end when torchrun is gone: killed outright, it does not end its ranks, and they would train on."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        launcher = int(os.environ.get(LAUNCHER, os.getppid()))
        threading.Thread(target=_watch, args=(launcher,), daemon=True, name="launcher-watch").start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(LAUNCHER_CHECK_S)
    os._exit(1)
