"""Requests by their Idempotency-Key: one that comes again joins the work in flight, or gets the reply that was kept.

Promises (tests/unit/test_service_front.py): a key is never scored twice, as long as its reply is kept (KEPT_BYTES of
them, the oldest leave first; one with hidden states may be larger than all of it, and is not kept); what failed is
forgotten, so that a retry is a new try; a request whose last client has hung up is withdrawn from the queue if nothing
of it has begun.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np

from megatron_mopd.scores import Scores
from megatron_mopd.service.body import ScoreCall
from megatron_mopd.service.checks import Refusal
from megatron_mopd.service.work import QueueFull, Request, WorkQueue

KEPT_BYTES = 1 << 26
ENTRY_BYTES = 1 << 10
"""What an entry takes beside its scores, roughly."""
RETRY_AFTER_S = 1


class _Entry:
    """One key: the work for it, and how many clients wait for that."""

    def __init__(self, call: ScoreCall):
        self.digest, self.num_clients = call.digest(), 0
        self.num_bytes = ENTRY_BYTES
        loop = asyncio.get_running_loop()
        self.scores: asyncio.Future[Scores] = loop.create_future()
        settle = partial(loop.call_soon_threadsafe, self._settle)
        self.request = Request(call.teacher, call.rows, settle, call.with_hidden)
        self._row_ends = np.cumsum(call.rows.response_lengths)

    def _settle(self, result: Scores | Exception) -> None:
        if isinstance(result, Exception):
            self._fail(f"cannot be asked: {result}")
        elif not (finite := np.isfinite(result.logprobs)).all():
            row = np.searchsorted(self._row_ends, finite.argmin(), side="right")
            self._fail(f"gives non-finite log-probs for row {row}")
        else:
            self.num_bytes += result.nbytes
            self.scores.set_result(result)

    def _fail(self, problem: str) -> None:
        self.scores.set_exception(Refusal(500, f"teacher {self.request.teacher} {problem}"))
        self.scores.exception()  # seen, even where all clients have hung up


class Replies:
    """`check_open` raises Refusal where no new work is taken."""

    def __init__(self, queue: WorkQueue, check_open: Callable[[], None]):
        self._queue, self._check_open = queue, check_open
        self._entries: dict[str, _Entry] = {}
        self._kept: deque[tuple[str, _Entry]] = deque()
        self._kept_bytes = 0

    async def scores(self, key: str, call: ScoreCall) -> Scores:
        """Row after row. An empty key is none."""
        entry = self._entries.get(key)
        if entry is None:
            entry = self._begin(key, call)
        elif entry.digest != call.digest():
            raise Refusal(409, f"Idempotency-Key {key} came before with another body; use a key per body")
        entry.num_clients += 1
        try:
            return await asyncio.shield(entry.scores)
        finally:
            entry.num_clients -= 1
            if not entry.num_clients and not entry.scores.done() and self._queue.withdraw(entry.request):
                self._forget(key, entry)

    def _begin(self, key: str, call: ScoreCall) -> _Entry:
        self._check_open()
        entry = _Entry(call)
        try:
            self._queue.add(entry.request)
        except QueueFull:
            raise Refusal(429, "too many tokens wait; try again later", RETRY_AFTER_S) from None
        if key:
            self._entries[key] = entry
            entry.scores.add_done_callback(lambda done: self._keep(key, entry, done))
        return entry

    def _keep(self, key: str, entry: _Entry, done: asyncio.Future[Scores]) -> None:
        if done.cancelled() or done.exception() is not None:
            return self._forget(key, entry)
        self._kept.append((key, entry))
        self._kept_bytes += entry.num_bytes
        while self._kept_bytes > KEPT_BYTES:
            old_key, old = self._kept.popleft()
            self._kept_bytes -= old.num_bytes
            self._forget(old_key, old)

    def _forget(self, key: str, entry: _Entry) -> None:
        if self._entries.get(key) is entry:
            del self._entries[key]
