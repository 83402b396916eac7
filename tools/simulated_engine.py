"""A cluster of rollout engines as a cost model, behind the protocol of the real ones.

An engine decodes all its running sequences together: a token of each takes `step_s + sequence_s * running`. Prefill
goes one request after the other, beside decoding. Sequences wait while the key-value cache is full, and the youngest
goes back to wait where the running ones outgrow it, as in SGLang; its past is computed again.

Tokens mean nothing here: `length_of(trajectory id)` is all that is known of a response.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from megatron_mopd.protocols import KvUse, SampleRequest
from megatron_mopd.types import Segment


@dataclass(frozen=True)
class Cluster:
    """Numbers like those of one engine on 8 GPUs with a large mixture of experts."""

    engines: int = 8
    step_s: float = 0.020
    sequence_s: float = 0.0001
    prefill_tokens_per_s: float = 20000.0
    kv_tokens: int = 1_000_000
    """Of one engine."""
    max_running: int = 256
    """Of one engine."""

    def tokens_per_s(self, running: int) -> float:
        """Of all sequences of one engine together."""
        return running / (self.step_s + self.sequence_s * running)


@dataclass(eq=False)
class _Sequence:
    request: SampleRequest
    future: asyncio.Future[Segment]
    goal: int
    """Tokens until it stops, or its budget ends."""
    sampled: int = 0
    began: float = 0.0
    """The engine's count of decoding steps when it joined."""
    is_cached: bool = False


@dataclass(eq=False)
class _Engine:
    """Every running sequence gets one token at each decoding step, so one count of steps serves all of them."""

    cluster: Cluster
    end: Callable[[_Sequence, str], None]
    waiting: list[_Sequence] = field(default_factory=list)
    running: list[tuple[float, int, _Sequence]] = field(default_factory=list)
    """A heap by the step at which each ends."""
    steps: float = 0.0
    busy_tokens: float = 0.0
    kv_used: float = 0.0
    prefill_until: float = 0.0
    timer: asyncio.TimerHandle | None = None
    counted_at: float = 0.0
    serial: int = 0

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.running)

    def count(self) -> None:
        """Bring the count of steps up to now."""
        now, b = asyncio.get_running_loop().time(), len(self.running)
        if b:
            steps = (now - self.counted_at) * self.cluster.tokens_per_s(b) / b
            self.steps += steps
            self.kv_used += steps * b
        self.counted_at = now

    def look(self) -> None:
        """End what has reached its goal, make room, take in what fits, and set the timer for the next change."""
        self.count()
        while self.running and self.running[0][0] <= self.steps + 1e-6:
            self._leave(heapq.heappop(self.running)[2], finished=True)
        while self.kv_used > self.cluster.kv_tokens and len(self.running) > 1:
            youngest = max(self.running, key=lambda item: item[1])
            self.running.remove(youngest)
            heapq.heapify(self.running)
            self._leave(youngest[2], finished=False)
            self.waiting.insert(0, youngest[2])
        self._take_in()
        self._set_timer()

    def _take_in(self) -> None:
        now = asyncio.get_running_loop().time()
        while self.waiting and len(self.running) < self.cluster.max_running:
            s = self.waiting[0]
            context = len(s.request.token_ids) + s.sampled
            if self.running and self.kv_used + context > 0.95 * self.cluster.kv_tokens:
                break
            if not s.is_cached:
                start = max(now, self.prefill_until)
                self.prefill_until = start + context / self.cluster.prefill_tokens_per_s
                s.is_cached = True
                if self.prefill_until > now:
                    break  # it joins when its past is there
            if self.prefill_until > now:
                break
            self.waiting.pop(0)
            self.kv_used += context
            s.began = self.steps
            self.serial += 1
            heapq.heappush(self.running, (self.steps + s.goal - s.sampled, self.serial, s))

    def _leave(self, s: _Sequence, finished: bool) -> None:
        self.kv_used -= len(s.request.token_ids) + s.sampled + (self.steps - s.began)
        new = s.goal - s.sampled if finished else min(s.goal - s.sampled - 1, int(self.steps - s.began))
        s.sampled += max(0, new)
        self.busy_tokens += max(0, new)
        s.is_cached = False
        if finished:
            self.end(s, "done")

    def _set_timer(self) -> None:
        loop = asyncio.get_running_loop()
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        nexts = []
        if self.waiting and self.prefill_until > loop.time():
            nexts.append(self.prefill_until - loop.time())
        if b := len(self.running):
            per_step = b / self.cluster.tokens_per_s(b)
            nexts.append(max(0.0, self.running[0][0] - self.steps) * per_step)
            if self.kv_used < self.cluster.kv_tokens:
                nexts.append((self.cluster.kv_tokens - self.kv_used + 1) / b * per_step)
        if nexts:
            self.timer = loop.call_later(max(1e-6, min(nexts)), self.look)

    def stop(self) -> None:
        self.count()
        for _, _, s in self.running:
            self._leave(s, finished=False)
            self.end(s, "abort")
        for s in self.waiting:
            self.end(s, "abort")
        self.running, self.waiting, self.kv_used, self.prefill_until = [], [], 0.0, 0.0
        self._set_timer()


class SimulatedEngine:
    """Implements protocols.RolloutEngine. A trajectory goes to the engine that has least to do."""

    def __init__(self, cluster: Cluster, length_of: Callable[[str], int]) -> None:
        self.cluster, self._length_of = cluster, length_of
        self.weight_version, self.kv = 0, KvUse()
        self._engines = [_Engine(cluster, self._end) for _ in range(cluster.engines)]

    @property
    def sampled_tokens(self) -> float:
        return sum(e.busy_tokens for e in self._engines)

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def update_weights(self, folder: Path | None, weight_version: int) -> None:
        self.weight_version = weight_version

    async def generate(self, request: SampleRequest) -> Segment:
        # its response so far is what its prompt has grown by
        left = self._length_of(request.trajectory_id) - (len(request.token_ids) - PROMPT_TOKENS)
        future: asyncio.Future[Segment] = asyncio.get_running_loop().create_future()
        sequence = _Sequence(request, future, min(left, request.max_new_tokens))
        engine = min(self._engines, key=lambda e: e.load)
        engine.count()
        engine.waiting.append(sequence)
        engine.look()
        return await future

    async def interrupt(self) -> None:
        for engine in self._engines:
            engine.stop()

    def _end(self, s: _Sequence, reason: str) -> None:
        n = s.sampled
        if reason == "done":
            reason = "stop" if n < s.request.max_new_tokens else "length"
        if not s.future.done():
            s.future.set_result(Segment((0,) * n, (0.0,) * n, (True,) * n, self.weight_version, reason))


PROMPT_TOKENS = 512
