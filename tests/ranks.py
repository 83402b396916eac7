"""Pools of gloo ranks that live for a whole test run: one start per size, then under a second a case.

    def case(layout): ...            # at the top of a test module, so that a worker can import it
    results = ranks(2)(case, layout)   # one result per rank

A rank's traceback is shown where one fails; a pool that fails or takes too long is stopped, and the next case starts
another.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

TIMEOUT_S = 120.0
CASES_A_START = 12
"""Then the ranks are forked anew: the gradient hooks of Megatron's DDP keep a model and its process groups alive,
and each gloo group has a thread that wakes every 10 ms. Thousands of them slow every later case."""


class Pool:
    def __init__(self, size: int):
        self.size = size
        self._workers: list[tuple[Any, Connection]] = []
        self._cases = 0

    def __call__(self, function: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """Run `function(*args)` on every rank at once. AssertionError with the first traceback, or TimeoutError."""
        if self._cases == CASES_A_START:
            self.stop()
        if not self._workers:
            self._start()
        self._cases += 1
        for _, connection in self._workers:
            connection.send((function, args))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(results) < self.size:
            open_ranks = {c: rank for rank, (_, c) in enumerate(self._workers) if rank not in results}
            ready = wait(list(open_ranks), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.stop()
                raise TimeoutError(f"ranks {sorted(open_ranks.values())} of {self.size} took longer than {timeout_s} s")
            for connection in ready:
                assert isinstance(connection, Connection)
                results[open_ranks[connection]] = self._receive(connection, open_ranks[connection])
        return [results[rank] for rank in range(self.size)]

    def _receive(self, connection: Connection, rank: int) -> Any:
        try:
            failed, result = connection.recv()
        except EOFError:
            failed, result = True, "the process ended"
        if failed:
            self.stop()  # the other ranks may wait for this one in a collective
            raise AssertionError(f"rank {rank} of {self.size}:\n{result}")
        return result

    def _start(self) -> None:
        # Forked from a process that has imported Megatron once; the test process itself never imports it.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["megatron_mopd.mcore.weights", "megatron.core.pipeline_parallel"])
        store = os.path.join(tempfile.mkdtemp(prefix="ranks-"), "store")
        self._cases = 0
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, rank, self.size, store, sys.path))
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def stop(self) -> None:
        for _, connection in self._workers:
            connection.close()  # a worker that waits for work ends by itself
        for process, _ in self._workers:
            process.join(timeout=2.0)
            if process.is_alive():
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that a checkpoint started
                process.join()
        self._workers = []


def _work(connection: Connection, rank: int, size: int, store: str, path: list[str]) -> None:
    os.setsid()
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path[:] = path
    import torch
    import torch.distributed as dist

    from megatron_mopd.mcore import device  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            return dist.destroy_process_group()
        try:
            connection.send((False, function(*args)))
        except BaseException:
            connection.send((True, traceback.format_exc()))


class Pools:
    """The pools of a test run by size: `ranks(4)` is the pool of four."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def __call__(self, size: int) -> Pool:
        return self._pools.setdefault(size, Pool(size))

    def stop(self) -> None:
        for pool in self._pools.values():
            pool.stop()
