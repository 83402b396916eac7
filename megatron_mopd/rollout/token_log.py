"""The token log: what is in flight between two steps, on disk, so that it outlives the driver.

    RUN/trajectories/in_flight_00000012.log     what step 12 added when it was over: frames, back to back

    frame    length, uint32 little-endian | CRC32 of length and payload | payload
    payload  length of the head, uint32 | head, JSON | the columns that the head counts, as raw arrays

A file is written once, synced, and never changed; a trajectory that takes several steps has frames in the files of all
of them. A `Cut` says what a state consists of: the files `first` to `step`, the last up to `size`. Whoever continues
that step reads so far; what lies behind it is of a step that is made again, and is dropped with a line that says so.

Promises (tests/unit/test_token_log.py): frames read back to the bit; whatever is in a file, reading it gives the frames
that were written, or a UserError of one line. No pickle, no eval.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_mopd.errors import UserError

COLUMNS = {"token_ids": "<i4", "logprobs": "<f8", "loss_mask": "|b1", "routed_experts": "<i2"}
_FRAME, _HEAD = struct.Struct("<II"), struct.Struct("<I")


class Frame(NamedTuple):
    head: dict[str, Any]
    columns: Mapping[str, np.ndarray]


class Cut(NamedTuple):
    """The end of a step: the steps whose files are needed, and how much of the last one."""

    first: int
    step: int
    size: int


class TokenLog:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def file(self, step: int) -> Path:
        return self._folder / f"in_flight_{step:08d}.log"

    def write(self, step: int, first: int, frames: Iterable[Frame]) -> Cut:
        """What `step` adds; the state needs the files from `first` on. Synced when this returns."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with self.file(step).open("wb") as out:
            for frame in frames:
                out.write(encode(frame))
            out.flush()
            os.fsync(out.fileno())
            size = out.tell()
        _sync_folder(self._folder)
        return Cut(first, step, size)

    def read(self, cut: Cut) -> list[Frame]:
        """All frames of the state, oldest first. What is behind it in its last file is dropped, with a line on stderr;
        so are the files of later steps."""
        frames = []
        for step in range(cut.first, cut.step + 1):
            frames += self._read_file(step, cut.size if step == cut.step else None)
        self.drop_after(cut.step)
        return frames

    def drop_after(self, step: int) -> None:
        """Forget what later steps have written: they are made again."""
        for later, file in self._files():
            if later > step:
                found, torn = _count(file.read_bytes())
                end = ", the last torn" if torn else ""
                _say(f"{file}: step {later} is made again, its {found} frames{end} are dropped")
                file.unlink()

    def drop_before(self, first: int) -> None:
        """No state needs them any longer."""
        for step, file in self._files():
            if step < first:
                file.unlink()

    def _files(self) -> list[tuple[int, Path]]:
        names = sorted(self._folder.glob("in_flight_*.log"))
        return [(int(f.stem.removeprefix("in_flight_")), f) for f in names if f.stem[10:].isdecimal()]

    def _read_file(self, step: int, size: int | None) -> list[Frame]:
        file = self.file(step)
        try:
            data = file.read_bytes()
        except OSError as error:
            raise _broken(file, error.strerror or str(error)) from error
        if size is not None and len(data) > size:
            _say(f"{file} has {len(data) - size} bytes behind the end of step {step}: they are dropped")
            os.truncate(file, size)
        elif size is not None and len(data) < size:
            raise _broken(file, f"it has {len(data)} of {size} bytes")
        return list(decode(data[:size], file))


def encode(frame: Frame) -> bytes:
    columns = {name: np.ascontiguousarray(frame.columns[name], dtype) for name, dtype in COLUMNS.items()
               if name in frame.columns}  # fmt: skip
    head = json.dumps({**frame.head, "columns": {name: c.size for name, c in columns.items()}}).encode()
    payload = b"".join([_HEAD.pack(len(head)), head, *(c.tobytes() for c in columns.values())])
    if len(payload) >= 1 << 32:
        raise UserError(f"a trajectory has {len(payload)} bytes in one step; lower rollout.max_response_tokens")
    return _FRAME.pack(len(payload), _checksum(payload)) + payload


def decode(data: bytes, file: Path) -> Iterator[Frame]:
    """Raises UserError where the data does not consist of whole frames."""
    at = 0
    while at < len(data):
        payload = _payload(data, at)
        if payload is None:
            raise _broken(file, f"the frame at byte {at} is torn or damaged")
        try:
            yield _frame(payload)
        except (ValueError, KeyError, TypeError, struct.error, RecursionError, AttributeError) as error:
            raise _broken(file, f"the frame at byte {at} is none of this project: {error}") from error
        at += _FRAME.size + len(payload)


def _payload(data: bytes, at: int) -> bytes | None:
    """Of the frame there; None where there is no whole one."""
    if at + _FRAME.size > len(data):
        return None
    length, checksum = _FRAME.unpack_from(data, at)
    payload = data[at + _FRAME.size : at + _FRAME.size + length]
    return payload if len(payload) == length and _checksum(payload) == checksum else None


def _frame(payload: bytes) -> Frame:
    (length,) = _HEAD.unpack_from(payload)
    at = _HEAD.size + length
    if at > len(payload):
        raise ValueError(f"a head of {length} bytes in {len(payload)}")
    head = json.loads(payload[_HEAD.size : at])
    counts, columns = head.pop("columns"), {}
    for name, count in counts.items():
        dtype = np.dtype(COLUMNS[name])
        if type(count) is not int or not 0 <= count * dtype.itemsize <= len(payload) - at:
            raise ValueError(f"{name} of {count!r} entries")
        columns[name] = np.frombuffer(payload, dtype, count, at)
        at += count * dtype.itemsize
    if at != len(payload):
        raise ValueError(f"{len(payload) - at} bytes too many")
    return Frame(head, columns)


def _count(data: bytes) -> tuple[int, bool]:
    """Whole frames from the beginning, and whether something else is behind them."""
    at = count = 0
    while at < len(data) and (payload := _payload(data, at)) is not None:
        at, count = at + _FRAME.size + len(payload), count + 1
    return count, at < len(data)


def _checksum(payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(_HEAD.pack(len(payload))))


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _broken(file: Path, what: str) -> UserError:
    reason = " ".join(what.split())[:300]
    return UserError(
        f"{file}: {reason}; put the file back as it was, or continue from another checkpoint (write its name into "
        "checkpoints/latest)"
    )


def _say(line: str) -> None:
    print(f"mopd: {line}", file=sys.stderr, flush=True)
