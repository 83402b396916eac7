"""One run at a time in a run folder: a lock that the kernel drops with the process that holds it."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_mopd.errors import UserError

FILE_NAME = ".lock"
WAIT_S = 15.0
"""A run that was killed a moment ago needs a little to end."""


@contextmanager
def locked(run_folder: Path, wait_s: float = WAIT_S) -> Iterator[None]:
    """Hold the lock of `run_folder`. Raises UserError where another process has it and keeps it for `wait_s`."""
    run_folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + wait_s
    with (run_folder / FILE_NAME).open("w") as file:
        while not try_lock(file.fileno()):
            if time.monotonic() > deadline:
                raise UserError(f"another run is at work in {run_folder}; wait for it or choose another run.folder")
            time.sleep(0.1)
        yield


def try_lock(descriptor: int) -> bool:
    """Take the kernel's lock on an open file, until it is closed; False where another process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
