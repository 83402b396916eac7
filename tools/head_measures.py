"""Time, memory and collectives of one call, on a CPU or a GPU, for tools/bench_head.py."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from head_methods import Answer, Problem

HAS_GPU = torch.cuda.is_available()
COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")


def timed(method: Callable[[Problem], Answer], p: Problem) -> float:
    """Seconds: of the processor on a CPU, which other processes change less, between events on a GPU."""
    if not HAS_GPU:
        start = time.process_time()
        method(p)
        return time.process_time() - start
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    method(p)
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1e3


def peak_scratch(method: Callable[[Problem], Answer], p: Problem) -> int:
    """Bytes beyond what is there before and what is returned: of the allocator on a GPU, of the process on a CPU."""
    if HAS_GPU:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        answer = method(p)
        peak = torch.cuda.max_memory_allocated()
    else:
        before = resident_from_now()
        answer = method(p)
        peak = peak_resident()
    return peak - before - sum(x.nbytes for x in answer if x is not None)


def resident_from_now() -> int:
    """The bytes of this process in memory; `peak_resident` counts from here on."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_resident() -> int:
    return _status("VmHWM")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


@contextmanager
def counted() -> Iterator[list[str]]:
    """The collectives that are called within."""
    calls: list[str] = []
    upstream = {name: getattr(dist, name) for name in COLLECTIVES}

    def counting(name: str) -> Callable:
        def call(*args, **kwargs):
            calls.append(name)
            return upstream[name](*args, **kwargs)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, counting(name))
    try:
        yield calls
    finally:
        for name, function in upstream.items():
            setattr(dist, name, function)
