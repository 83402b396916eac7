"""A rollout engine without a model: tokens are a function of (trajectory, position), and so are lengths."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_mopd.protocols import KvUse, Observation, SampleRequest
from megatron_mopd.types import Outcome, Prompt, RenderedPrompt, Segment, Trajectory

STOP = 0


def token_of(trajectory_id: str, position: int) -> int:
    return 1 + zlib.crc32(f"{trajectory_id}/{position}".encode()) % 97


class ToyEngine:
    """A column at a time, like the embedded one. `length_of(id)` is when a response stops."""

    def __init__(self, length_of: Callable[[str], int]) -> None:
        self.weight_version, self.kv = 0, KvUse()
        self.columns = 0
        self.asked: list[SampleRequest] = []
        self._length_of = length_of
        self._running: dict[asyncio.Future[Segment], tuple[SampleRequest, list[int]]] = {}
        self._task: asyncio.Task[None] | None = None
        self._interrupted = False

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def update_weights(self, folder: Path | None, weight_version: int) -> None:
        self.weight_version = weight_version

    async def generate(self, request: SampleRequest) -> Segment:
        assert request.max_new_tokens > 0, request
        self.asked.append(request)
        future: asyncio.Future[Segment] = asyncio.get_running_loop().create_future()
        self._running[future] = (request, [])
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return await future

    async def interrupt(self) -> None:
        if self._task is not None and not self._task.done():
            self._interrupted = True
            await self._task
            self._interrupted = False

    async def _run(self) -> None:
        while self._running and not self._interrupted:
            for _ in range(4):  # turns that a real column would take
                await asyncio.sleep(0)
            self.columns += 1
            for future, (request, ids) in list(self._running.items()):
                position = len(request.token_ids) + len(ids)
                stops = position - 2 + 1 >= self._length_of(request.trajectory_id)  # prompts have two tokens
                ids.append(STOP if stops else token_of(request.trajectory_id, position))
                if stops or len(ids) == request.max_new_tokens:
                    self._end(future, "stop" if stops else "length")
            await asyncio.sleep(0)
        if self._interrupted:
            for future in list(self._running):
                self._end(future, "abort")

    def _end(self, future: asyncio.Future[Segment], reason: str) -> None:
        _, ids = self._running.pop(future)
        if not future.done():
            version = self.weight_version
            future.set_result(Segment(tuple(ids), (-0.5,) * len(ids), (True,) * len(ids), version, reason))


class OneTurn:
    """Resumable, and says who restored it."""

    stop_token_ids: tuple[int, ...] = (STOP,)

    def __init__(self, prompt: Prompt) -> None:
        self.restored: dict | None = None

    async def step(self, token_ids: tuple[int, ...]) -> Observation:
        return Observation((), done=True)

    async def snapshot(self) -> dict:
        return {"seen": 1}

    async def restore(self, state: dict) -> None:
        self.restored = state

    async def score(self, trajectory: Trajectory) -> Outcome:
        return Outcome(1.0, int(trajectory.loss_mask.sum()))


def render(prompts: Sequence[Prompt]) -> list[RenderedPrompt]:
    return [RenderedPrompt(prompt, (7, 8), (7, 9)) for prompt in prompts]
