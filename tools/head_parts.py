"""Where the time of the log-prob head goes on a CPU, for tools/bench_head.py --parts.

Of a call of `ours`: processor time of each product, of the elementwise part, and of what is left, which is work on
[c, D] and memory; and what the kernel of the operating system took of it all, which is fresh memory's page faults.
The bare products beside it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from head_methods import Problem, floor, ours

from megatron_mopd.mcore import one_pass, vocab_slice

PARTS = {
    "GEMM 1, logits": (vocab_slice, "product"),
    "elementwise": (vocab_slice, "add_exponentials"),
    "GEMMs 2 and 3, E W and E^T (a H)": (one_pass, "product"),
    "GEMM 3 of later chunks": (one_pass, "add_product"),
}


def parts(p: Problem) -> dict[str, float]:
    """Seconds of one call; call it a second time for those of a warm process."""
    bare, _ = _timed(lambda: floor(p))
    with _watched() as seconds:
        total, system = _timed(lambda: ours(p))
    rest = total - sum(seconds.values())
    return {"floor": bare, "ours": total, **seconds, "rest": rest, "of ours, the kernel's": system}


def _timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Processor time, and the operating system's part of it."""
    start, system = time.process_time(), os.times().system
    call()
    return time.process_time() - start, os.times().system - system


@contextmanager
def _watched() -> Iterator[dict[str, float]]:
    seconds = dict.fromkeys(PARTS, 0.0)
    upstream = {name: getattr(module, function) for name, (module, function) in PARTS.items()}

    def watching(name: str) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            start = time.process_time()
            upstream[name](*arguments)
            seconds[name] += time.process_time() - start

        return call

    for name, (module, function) in PARTS.items():
        setattr(module, function, watching(name))
    try:
        yield seconds
    finally:
        for name, (module, function) in PARTS.items():
            setattr(module, function, upstream[name])
