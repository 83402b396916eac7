"""Lanes: one per teacher. A finished trajectory waits in its teacher's lane, and is scored while others are still
sampled.

Promises: what is sent together depends on the order of arrival alone (a lane sends once `batch_tokens` wait, the
rest at the end), so the scores of a step are reproducible to the bit where the scorer's are; each trajectory is scored
once; a reply of another length or a non-finite one raises and names the teacher and the trajectory.
"""

from __future__ import annotations

import asyncio

import numpy as np

from megatron_mopd.protocols import ScoreRequest, TeacherScorer
from megatron_mopd.types import Graded, Trajectory


class Lane:
    """Waiting and running trajectories of one teacher."""

    def __init__(self, teacher: str, scorer: TeacherScorer, batch_tokens: int) -> None:
        self._teacher, self._scorer, self._batch_tokens = teacher, scorer, batch_tokens
        self._waiting: list[Trajectory] = []
        self._waiting_tokens = 0
        self._running: list[asyncio.Task[list[Graded]]] = []

    def submit(self, trajectory: Trajectory) -> None:
        self._waiting.append(trajectory)
        self._waiting_tokens += len(trajectory.prompt.teacher_ids) + len(trajectory.response_ids)
        if self._waiting_tokens >= self._batch_tokens:
            self._send()

    async def drain(self) -> list[Graded]:
        """Send what still waits and return everything submitted since the last drain."""
        if self._waiting:
            self._send()
        running, self._running = self._running, []
        return [graded for batch in await asyncio.gather(*running) for graded in batch]

    def _send(self) -> None:
        batch, self._waiting, self._waiting_tokens = self._waiting, [], 0
        self._running.append(asyncio.create_task(self._score(batch)))

    async def _score(self, batch: list[Trajectory]) -> list[Graded]:
        requests = [ScoreRequest(t.id, t.prompt.teacher_ids, tuple(int(i) for i in t.response_ids)) for t in batch]
        replies = await self._scorer.score(self._teacher, requests)
        graded = [Graded(t, self._teacher, reply) for t, reply in zip(batch, replies, strict=True)]
        for g in graded:
            if not np.isfinite(g.teacher_logprobs).all():
                raise ValueError(f"teacher {self._teacher} returned a non-finite log-prob for {g.trajectory.id}")
        return graded
