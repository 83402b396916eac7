"""The folders of workspaces that are in use, on a disk that other drivers use too, or used before they were killed.

A driver holds a lock on its folder for as long as it lives, and removes those of which nobody holds the lock. All that
makes sandboxes for it has the name of its folder in its environment (programs inside have not), so that what is left of
a driver that was killed within the first milliseconds of a sandbox, before bubblewrap ends with its parent, is found:
by the next driver, or by a later one if a child of the killed one, not yet become another program, held the lock.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from megatron_mopd.protocols import WorkspaceFailed
from megatron_mopd.sandbox.tree import FOLDER

VARIABLE = "MOPD_WORKSPACES"
STATE_FOLDERS = {"tmp": 0o1777, "work": 0o755}


class Live:
    def __init__(self, root: Path) -> None:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chmod(root, 0o700)  # a program may leave a setuid file of this user's: nobody else comes near it
        with (root / "lock").open("wb") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            for folder in root.iterdir():
                if folder.is_dir() and (held := _locked(folder / "lock")):
                    end_processes(folder.name)
                    remove(folder)
                    held.close()
            self.folder = root / uuid.uuid4().hex
            self.folder.mkdir(mode=0o700)
            held = _locked(self.folder / "lock")
            assert held is not None
            self._lock = held

    @property
    def environment(self) -> dict[str, str]:
        """Of whatever makes a sandbox."""
        return {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", VARIABLE: self.folder.name}

    def new(self, owner: int | None) -> Path:
        """A folder with an empty state."""
        folder = self.folder / uuid.uuid4().hex
        for path in (folder, folder / "state"):
            path.mkdir(mode=0o700)
        for name, mode in STATE_FOLDERS.items():
            path = folder / "state" / name
            path.mkdir()
            path.chmod(mode)
            if owner is not None:
                os.chown(path, owner, owner)
        return folder

    def remove(self) -> None:
        remove(self.folder)
        self._lock.close()


def _locked(file: Path) -> BinaryIO | None:
    """The open file, unless another process holds it."""
    lock = file.open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


def end_processes(name: str) -> None:
    """Those that a dead driver of this folder name started, and that never came to start a program."""
    while _ended_some(f"{VARIABLE}={name}".encode()):  # they may have started others meanwhile
        time.sleep(0.01)


def _ended_some(mark: bytes) -> bool:
    found = False
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # another user's, or gone
            process = os.pidfd_open(int(environment.parent.name))
            try:
                if mark in environment.read_bytes().split(b"\0"):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
                    found = True
            finally:
                os.close(process)
    return found


def remove(folder: Path) -> None:
    """By the programs that do it for trees of any depth and any rights, and follow no link."""
    if os.geteuid() != 0:
        subprocess.run(["chmod", "-R", "u+rwX", "--", folder], check=False, capture_output=True)
    done = subprocess.run(
        ["rm", "-rf", "--one-file-system", "--", folder], check=False, capture_output=True, text=True, errors="replace"
    )
    if done.returncode != 0:
        raise WorkspaceFailed(f"{folder} cannot be removed: {done.stderr[-300:].strip()}")


@contextmanager
def opened_state(folder: Path) -> Iterator[int]:
    state = os.open(folder, FOLDER)
    try:
        yield state
    finally:
        os.close(state)
