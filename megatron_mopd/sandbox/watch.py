"""What the programs of one sandbox take together, which no limit of the kernel holds for a user that is not root: their
memory, and the bytes of their files, those without a name included.

Looks a few times a second, so what is taken can be above its limit for about that long. Programs are told to the kernel
as the first to end when memory is short (bubblewrap_command.py), so that an overshoot never ends the trainer.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from megatron_mopd.sandbox.limits import Limits
from megatron_mopd.sandbox.tree import OverLimit, Usage, measure

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def taken(state: int, init_pid: int | None, limits: Limits, before: Usage) -> tuple[str | None, Usage, str | None]:
    """Why the sandbox must end, if it must; what its files are; why its workspace is at an end, if it is.

    Args:
    state: the open folder of its files.
    init_pid: the first process of its namespace; None: nothing runs.
    before: as much may stay, though not grow: a workspace over its limit can be cleaned up.
    """
    pids = processes(init_pid) if init_pid is not None else []
    if reason := over_memory(pids, limits):
        return reason, before, None
    try:
        files = measure(state, limits)
    except OverLimit as error:
        return None, before, str(error)
    except PermissionError:
        return "the rights of its folders changed while they were counted", before, None
    usage = Usage(files.num_bytes + nameless_bytes(pids), files.num_files)
    shrinks = usage.num_bytes <= before.num_bytes and usage.num_files <= before.num_files
    return (None if shrinks else usage.over(limits)), usage, None


def processes(init_pid: int) -> list[int]:
    """It and all below it."""
    found = [init_pid]
    for pid in found:  # grows
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def over_memory(pids: list[int], limits: Limits) -> str | None:
    resident = sum(_resident_bytes(pid) for pid in pids)
    if resident > limits.memory_bytes:  # counts shared pages once for each process; the exact sum takes longer
        resident = sum(_proportional_bytes(pid) for pid in pids)
    if resident > limits.memory_bytes:
        return f"its programs take {resident >> 20} MiB of memory, more than memory_mb={limits.memory_mb}"
    return None


def _resident_bytes(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    return 0


def _proportional_bytes(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return _resident_bytes(pid)


def nameless_bytes(pids: list[int]) -> int:
    """Of regular files that are open and in no folder, memfd_create's too."""
    sizes: dict[tuple[int, int], int] = {}
    for pid in pids:
        for status in _open_files(pid):
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                sizes[status.st_dev, status.st_ino] = max(status.st_size, status.st_blocks * 512)
    return sum(sizes.values())


def _open_files(pid: int) -> Iterator[os.stat_result]:
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                yield os.stat(f"/proc/{pid}/fd/{name}")
