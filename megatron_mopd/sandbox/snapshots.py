"""Snapshots on disk: one archive each, named by the SHA-256 of its bytes.

Promises (tests/contract/test_workspace.py): a name stands for one state for ever; a snapshot is whole or absent,
whenever the machine stops; an archive whose bytes are not those of its name is refused.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO

from megatron_mopd.protocols import WorkspaceFailed
from megatron_mopd.sandbox.archive import BLOCK_BYTES, most_bytes, pack
from megatron_mopd.sandbox.limits import Limits

NAME = re.compile(r"[0-9a-f]{64}")


class Snapshots:
    def __init__(self, folder: Path, limits: Limits) -> None:
        self._folder, self._limits = folder, limits
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def save(self, state: int) -> str:
        """The name of the snapshot of an open folder to which nothing writes."""
        handle, part = tempfile.mkstemp(prefix=".part-", dir=self._folder)
        try:
            with open(handle, "wb") as file:
                hashing = _Hashing(file)
                pack(state, hashing, self._limits)  # type: ignore[arg-type]  # it only writes
                file.flush()
                os.fsync(file.fileno())
            name = hashing.digest.hexdigest()
            os.rename(part, self._file(name))
        except BaseException:
            os.unlink(part)
            raise
        self._sync()
        return name

    def open(self, name: str) -> BinaryIO:
        """The archive, checked. Raises WorkspaceFailed where there is none of that name, or another under it."""
        if not NAME.fullmatch(name):
            raise WorkspaceFailed(f"{name[:80]!r} is no name of a snapshot")
        try:
            file = self._file(name).open("rb")
        except FileNotFoundError:
            raise WorkspaceFailed(f"there is no snapshot {name} in {self._folder}") from None
        try:
            if os.fstat(file.fileno()).st_size > most_bytes(self._limits):
                raise WorkspaceFailed(f"snapshot {name} is larger than the limits of workspaces allow")
            if hashlib.file_digest(file, "sha256").hexdigest() != name:
                raise WorkspaceFailed(f"snapshot {name} in {self._folder} does not hold what its name says")
            file.seek(0)
        except BaseException:
            file.close()
            raise
        return file

    def keep_only(self, names: Collection[str]) -> None:
        """Remove all others, and what a process that was killed left of one that it was writing."""
        kept = {self._file(name) for name in names}
        for file in self._folder.iterdir():
            if file not in kept:
                file.unlink()

    def scratch(self) -> BinaryIO:
        """A file without a name, on the same disk."""
        return tempfile.TemporaryFile(dir=self._folder, buffering=BLOCK_BYTES)  # type: ignore[return-value]

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.tar"

    def _sync(self) -> None:
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class _Hashing:
    """Writes through, and hashes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self._file.write(data)
