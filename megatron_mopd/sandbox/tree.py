"""A folder that programs wrote which nobody has read, walked from outside.

Promises (tests/unit/test_sandbox_escapes.py): no link is followed, whatever is renamed meanwhile: every step goes from
an open folder to a name in it; nothing is opened but folders and regular files; no name, depth or number of files
makes it fail with anything but OverLimit. A folder keeps its owner's rwx: what a program took away is given back.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice

from megatron_mopd.protocols import WorkspaceFailed
from megatron_mopd.sandbox.limits import MAX_DEPTH, Limits

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
HANDLE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


class OverLimit(WorkspaceFailed):
    """The tree holds more than a workspace may; the message says of what."""


@dataclass(frozen=True)
class Entry:
    """`parent` is open until the next entry is asked for."""

    path: str
    name: str
    parent: int
    stat: os.stat_result

    @property
    def kind(self) -> int:
        return stat.S_IFMT(self.stat.st_mode)

    @property
    def num_bytes(self) -> int:
        """Also what a sparse file says it holds: an archive has its zeros."""
        return max(self.stat.st_size if self.kind == stat.S_IFREG else 0, self.stat.st_blocks * 512)


@dataclass(frozen=True)
class Usage:
    num_bytes: int
    num_files: int

    def over(self, limits: Limits, times: int = 1) -> str | None:
        """What it is more than so many times the limit of."""
        if self.num_bytes > times * limits.disk_bytes:
            return f"its files hold {self.num_bytes >> 20} MiB, more than disk_mb={limits.disk_mb}"
        if self.num_files > times * limits.max_files:
            return f"it has {self.num_files} files, more than max_files={limits.max_files}"
        return None


NOTHING = Usage(0, 0)


def entries(folder: int, max_files: int, prefix: str = "", depth: int = 1) -> Generator[Entry]:
    """In the order of their names, a folder before what is in it. What vanishes meanwhile is left out."""
    if depth > MAX_DEPTH:
        raise OverLimit(f"its folders are more than {MAX_DEPTH} deep")
    for name in names(folder, max_files):
        with suppress(FileNotFoundError, NotADirectoryError):
            entry = Entry(prefix + name, name, folder, os.stat(name, dir_fd=folder, follow_symlinks=False))
            yield entry
            if entry.kind == stat.S_IFDIR:
                with (
                    opened_folder(name, folder) as inner,
                    closing(entries(inner, max_files, f"{entry.path}/", depth + 1)) as below,
                ):
                    yield from below


def names(folder: int, max_files: int) -> list[str]:
    with os.scandir(folder) as listing:
        found = [item.name for item in islice(listing, max_files + 1)]
    if len(found) > max_files:
        raise OverLimit(f"a folder has more than {max_files} files")
    return sorted(found)


def measure(folder: int, limits: Limits) -> Usage:
    """What is there now. Raises OverLimit where it is too much to count, or more than twice the limits."""
    usage = NOTHING
    linked: set[tuple[int, int]] = set()
    for entry in entries(folder, 2 * limits.max_files):
        num_bytes = entry.num_bytes
        if entry.kind == stat.S_IFREG and entry.stat.st_nlink > 1:
            inode = (entry.stat.st_dev, entry.stat.st_ino)
            num_bytes = 0 if inode in linked else num_bytes
            linked.add(inode)
        usage = Usage(usage.num_bytes + num_bytes, usage.num_files + 1)
        if reason := usage.over(limits, times=2):
            raise OverLimit(reason)
    return usage


@contextmanager
def opened_folder(name: str, parent: int) -> Iterator[int]:
    handle = os.open(name, HANDLE | os.O_DIRECTORY, dir_fd=parent)
    try:
        path, mode = f"/proc/self/fd/{handle}", stat.S_IMODE(os.fstat(handle).st_mode)
        if mode & 0o700 != 0o700:
            os.chmod(path, mode | 0o700)
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(handle)
    try:
        yield folder
    finally:
        os.close(folder)


@contextmanager
def opened_file(name: str, parent: int) -> Iterator[int]:
    """A regular file for reading, also one whose owner may not read it."""
    handle = os.open(name, HANDLE, dir_fd=parent)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OverLimit(f"{name!r} is no regular file any more")
        path, mode = f"/proc/self/fd/{handle}", stat.S_IMODE(status.st_mode)
        if not mode & 0o400:
            os.chmod(path, mode | 0o400)
        try:
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        finally:
            if not mode & 0o400:
                os.chmod(path, mode)
    finally:
        os.close(handle)
    try:
        yield file
    finally:
        os.close(file)
