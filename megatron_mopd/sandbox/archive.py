"""A folder as one stream of bytes and back: an uncompressed tar of folders, files, links and hard links.

Neither direction trusts what it reads. `pack` follows no link and opens regular files only; `unpack` makes each member
new, below the folder that it was given, whatever links and names the archive has, and stops at the limits.

Promises (tests/contract/test_workspace.py, tests/unit/test_sandbox_escapes.py): contents, modes, links, hard links and
times come back, names may be any bytes; the same state gives the same bytes. Left out are sockets, whose listeners are
gone, and setuid and setgid bits; devices and FIFOs are refused.
"""

from __future__ import annotations

import os
import shutil
import stat
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from megatron_mopd.protocols import WorkspaceFailed
from megatron_mopd.sandbox.limits import MAX_DEPTH, Limits
from megatron_mopd.sandbox.tree import FOLDER, Entry, OverLimit, Usage, entries, opened_file

MODE_BITS = 0o1777
MTIME_NS = "MOPD.mtime_ns"
HEADER_BYTES = 8192
"""Most that a member takes beside its content: names of a few thousand bytes are stored twice."""
BLOCK_BYTES = 1 << 20


def pack(folder: int, archive: BinaryIO, limits: Limits) -> None:
    """Nothing may write to the folder meanwhile. Raises WorkspaceFailed for what is refused."""
    first: dict[tuple[int, int], str] = {}
    num_bytes = num_files = 0
    with tarfile.open(fileobj=archive, mode="w|", format=tarfile.PAX_FORMAT, errors="surrogateescape") as tar:
        for entry in entries(folder, limits.max_files):
            num_files += 1
            member = member_of(entry, first)
            if member is None:
                continue
            num_bytes += member.size
            if reason := Usage(num_bytes, num_files).over(limits):
                raise OverLimit(reason)
            if member.isreg():
                with opened_file(entry.name, entry.parent) as file, open(file, "rb", closefd=False) as content:
                    tar.addfile(member, content)
            else:
                tar.addfile(member)
            tar.members.clear()  # type: ignore[attr-defined]  # it would keep one object each


def member_of(entry: Entry, first: dict[tuple[int, int], str]) -> tarfile.TarInfo | None:
    """`first`: the path of each file with several names that was already packed."""
    member = tarfile.TarInfo(entry.path)
    member.mode, member.mtime = entry.stat.st_mode & MODE_BITS, max(0, int(entry.stat.st_mtime))
    # Beside tar's own, which is a float that does not come back exactly.
    member.pax_headers = {MTIME_NS: str(entry.stat.st_mtime_ns)}
    if entry.kind == stat.S_IFDIR:
        member.type = tarfile.DIRTYPE
    elif entry.kind == stat.S_IFLNK:
        member.type, member.linkname = tarfile.SYMTYPE, os.readlink(entry.name, dir_fd=entry.parent)
    elif entry.kind == stat.S_IFREG:
        inode = (entry.stat.st_dev, entry.stat.st_ino)
        if inode in first:
            member.type, member.linkname = tarfile.LNKTYPE, first[inode]
        else:
            member.size = entry.stat.st_size
            if entry.stat.st_nlink > 1:
                first[inode] = entry.path
    elif entry.kind == stat.S_IFSOCK:
        return None
    else:
        raise WorkspaceFailed(f"{entry.path!r} is a device or a FIFO, which no snapshot holds")
    return member


def most_bytes(limits: Limits) -> int:
    """No archive of a workspace within the limits is larger."""
    return limits.disk_bytes + limits.max_files * HEADER_BYTES + BLOCK_BYTES


def unpack(archive: BinaryIO, folder: int, limits: Limits, owner: int | None) -> None:
    """Into an empty folder. `owner`: user and group of all that is made, for a driver that is root.

    Raises WorkspaceFailed for an archive that `pack` does not write."""
    folders: list[tarfile.TarInfo] = []
    num_bytes = num_files = 0
    try:
        with tarfile.open(fileobj=archive, mode="r|", errors="surrogateescape") as tar:
            for member in tar:
                num_files, num_bytes = num_files + 1, num_bytes + member.size
                if reason := Usage(num_bytes, num_files).over(limits):
                    raise OverLimit(reason)
                _make(tar, member, folder, owner)
                if member.isdir():
                    folders.append(member)
                tar.members.clear()  # type: ignore[attr-defined]
        for member in reversed(folders):
            _finish_folder(member, folder)
    except (tarfile.TarError, OSError, ValueError, OverflowError, RecursionError) as error:
        raise WorkspaceFailed(f"the archive cannot be unpacked: {type(error).__name__}: {error}") from error


def _make(tar: tarfile.TarFile, member: tarfile.TarInfo, root: int, owner: int | None) -> None:
    with _parent_of(member.name, root) as (parent, name):
        if member.type == tarfile.DIRTYPE:
            os.mkdir(name, 0o700, dir_fd=parent)
        elif member.type == tarfile.SYMTYPE:
            os.symlink(member.linkname, name, dir_fd=parent)
        elif member.type == tarfile.LNKTYPE:
            with _parent_of(member.linkname, root) as (other, target):
                os.link(target, name, src_dir_fd=other, dst_dir_fd=parent, follow_symlinks=False)
        elif member.type == tarfile.REGTYPE and member.sparse is None:
            _write(tar, member, name, parent)
        else:
            raise WorkspaceFailed(f"the archive's {member.name!r} is of a type that no snapshot has: {member.type!r}")
        if member.type != tarfile.LNKTYPE:
            if owner is not None:
                os.chown(name, owner, owner, dir_fd=parent, follow_symlinks=False)
            if member.type == tarfile.REGTYPE:
                os.chmod(name, member.mode & MODE_BITS, dir_fd=parent)  # made above, no link; chown clears bits
            os.utime(name, ns=_times(member), dir_fd=parent, follow_symlinks=False)


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, name: str, parent: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    content = tar.extractfile(member)
    with open(os.open(name, flags, 0o600, dir_fd=parent), "wb") as file:
        if content is not None:
            shutil.copyfileobj(content, file, BLOCK_BYTES)
        if file.tell() != member.size:
            raise WorkspaceFailed(f"the archive ends within {member.name!r}")


def _finish_folder(member: tarfile.TarInfo, root: int) -> None:
    """Only now: a folder that may not be written to is filled first, and what is made in it changes its time."""
    with _parent_of(member.name, root) as (parent, name):
        folder = os.open(name, FOLDER, dir_fd=parent)
        try:
            os.fchmod(folder, member.mode & MODE_BITS | 0o700)
            os.utime(folder, ns=_times(member))
        finally:
            os.close(folder)


def _times(member: tarfile.TarInfo) -> tuple[int, int]:
    time_ns = int(member.pax_headers.get(MTIME_NS, int(member.mtime) * 10**9))
    return time_ns, time_ns


@contextmanager
def _parent_of(path: str, root: int) -> Iterator[tuple[int, str]]:
    """The open folder that holds `path`, reached from `root` by folders alone, and the last part of the path."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or len(parts) > MAX_DEPTH + 1:
        raise WorkspaceFailed(f"the archive has the name {path[:200]!r}, which no snapshot has")
    folder = os.dup(root)
    try:
        for part in parts[:-1]:
            inner = os.open(part, FOLDER, dir_fd=folder)
            os.close(folder)
            folder = inner
        yield folder, parts[-1]
    finally:
        os.close(folder)
