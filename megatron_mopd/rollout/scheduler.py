"""Partial rollouts: more prompts in flight than a step trains on, so that no step waits for its longest trajectory.

    oversampling 1.5, batch of 4     step 0: . . . x . x      pool of 6: a step is over once 4 are whole (.)
                                     step 1: x x . . . .      what was paused (x) goes on first, under the new weights

A step draws until `ceil(oversampling * batch_size)` prompts are in the pool, samples all of them, and ends once
`batch_size` prompts have all their samples; then the engine is interrupted and the rest waits for the next step. With
oversampling 1 nothing is ever interrupted: that is synchronous mode, the same code.

Nothing is dropped, so what is trained on has the lengths that the student samples, but for the first steps, which
finish short trajectories first. Nor does anything grow older than `max_staleness` weight versions: a prompt has until
step `begun + max_staleness`, and a finished one is left for the next step if otherwise the places of some later step
could not hold all that have to be in it. So a step may wait for the prompts whose last step it is; there are always
places for them if oversampling <= 1 + max_staleness, which preflight asks for.

Promises (tests/unit/test_scheduler.py): batches, and their order, follow from the configuration, the weights and the
tokens, if the engine's order does and environments answer at once (sampler.py); names of trajectories, and so the noise
of their tokens, do not depend on interruptions; with a token log the pool outlives the process.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

import numpy as np

from megatron_mopd.config import Partial
from megatron_mopd.prompts.source import Place
from megatron_mopd.rollout.pool import Entry, new_entry, read_pool, write_pool
from megatron_mopd.rollout.sampler import Gate, Sampling
from megatron_mopd.rollout.token_log import Cut, TokenLog
from megatron_mopd.types import Cell, Prompt, RenderedPrompt, Trajectory


class Source(Protocol):
    """prompts.source.PromptSource."""

    def take(self, place: Place, count: int, /) -> tuple[list[tuple[Place, Prompt]], Place]: ...


class _Step:
    """What is left to do of the step under way.

    `places[j]` are the places of this step and the j after it, `wanted[j]` the prompts whose last step is among them.
    """

    def __init__(self, pool: Sequence[Entry], version: int, batch_size: int, max_staleness: int) -> None:
        begun = [version if e.begun_at is None else e.begun_at for e in pool]
        self._steps_left = {e: max(0, b + max_staleness - version) for e, b in zip(pool, begun, strict=True)}
        steps_left = np.array(list(self._steps_left.values()), np.int64)
        self._wanted = np.bincount(steps_left, minlength=max_staleness + 1).cumsum()
        self._places = batch_size * np.arange(1, len(self._wanted) + 1)
        self.takes_all = len(pool) <= batch_size
        self.groups = {e: i for i, e in enumerate(pool)}
        self.gate = Gate()
        self.events: asyncio.Queue[tuple[asyncio.Task[None], Entry, int]] = asyncio.Queue()

    @property
    def is_full(self) -> bool:
        return self._places[0] == 0

    def must_have(self, entry: Entry) -> bool:
        """It is in this batch once it is whole."""
        return self.takes_all or self._steps_left[entry] == 0

    def may_have(self, entry: Entry) -> bool:
        """There is a place for it that nothing else needs."""
        others = self._wanted - (np.arange(len(self._wanted)) >= self._steps_left[entry])
        return not self.is_full and (self.must_have(entry) or bool((others <= self._places - 1).all()))

    def place(self, entry: Entry) -> None:
        self._places -= 1
        self._wanted[self._steps_left[entry] :] -= 1


class Scheduler:
    """`render` makes token ids of prompts. One step at a time: `begin`, all of `run`, `report`, `write`."""

    def __init__(
        self,
        source: Source,
        render: Callable[[Sequence[Prompt]], list[RenderedPrompt]],
        sampling: Sampling,
        batch_size: int,
        samples_per_prompt: int = 1,
        partial: Partial | None = None,
    ) -> None:
        self._source, self._render, self._sampling = source, render, sampling
        self._batch_size, self._samples_per_prompt = batch_size, samples_per_prompt
        self._partial = partial or Partial()
        self._pool: list[Entry] = []
        self._next: Place | None = None
        self._gate, self._kv_before = Gate(), asdict(sampling.engine.kv)

    @property
    def pool(self) -> Sequence[Entry]:
        return self._pool

    def begin(self, step: int) -> list[RenderedPrompt] | None:
        """Fill the pool for `step`. Returns the prompts that its batch will be of, None where that is to be seen."""
        place = self._next or Place(step, 0)
        want = math.ceil(self._partial.oversampling * self._batch_size) - len(self._pool)
        taken, self._next = self._source.take(place, max(0, want))
        rendered = self._render([prompt for _, prompt in taken])
        self._pool += [
            new_entry(place, prompt, self._sampling.environments, self._samples_per_prompt)
            for (place, _), prompt in zip(taken, rendered, strict=True)
        ]
        return [e.prompt for e in self._pool] if len(self._pool) <= self._batch_size else None

    async def run(self, taus: Mapping[Cell, float]) -> AsyncIterator[Trajectory]:
        """Sample; yield the trajectories of the batch, each as soon as it is certain to be in it. When this ends
        nothing is sampled any longer. Raises what an environment or the engine raises."""
        version = self._sampling.engine.weight_version
        step = _Step(self._pool, version, self._batch_size, self._partial.max_staleness)
        self._gate = step.gate
        sampling = replace(self._sampling, taus=taus)
        tasks = [
            asyncio.create_task(self._go_on(e, i, sampling, step))
            for e in self._pool
            for i, sample in enumerate(e.samples)
            if sample.trajectory is None
        ]
        try:
            for entry in list(self._pool):
                for trajectory in self._emit(entry, step):
                    yield trajectory
            while not step.is_full:
                task, entry, index = await step.events.get()
                task.result()
                entry.done.append(index)  # the gate is open: it is finished
                for trajectory in self._emit(entry, step):
                    yield trajectory
            await self._pause(step, tasks)
            while not step.events.empty():
                _, entry, index = step.events.get_nowait()
                entry.done += [index] * (entry.samples[index].trajectory is not None)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def report(self) -> dict[str, Any]:
        """Of the step that has just ended."""
        kv = asdict(self._sampling.engine.kv)
        before, self._kv_before = self._kv_before, kv
        waiting = [s for e in self._pool for s in e.samples if s.trajectory is None]
        return {
            "in_flight": len(waiting),
            "in_flight_tokens": sum(s.num_tokens for s in waiting),
            "surplus": sum(e.is_whole for e in self._pool),
            "interrupted": dict(self._gate.interrupted),
            "kv": {name: kv[name] - before[name] for name in kv},
        }

    async def write(self, log: TokenLog, step: int) -> Cut | None:
        """Leave the pool in the log; None where there is nothing that the next step would not find without."""
        if not self._pool and self._next == Place(step + 1, 0):
            return None
        assert self._next is not None, "a step has been begun"
        return await write_pool(log, step, self._pool, self._next)

    def restore(self, log: TokenLog, cut: Cut) -> None:
        """Take up what an earlier process left."""
        self._pool, self._next = read_pool(log, cut, self._sampling.environments)

    async def _go_on(self, entry: Entry, index: int, sampling: Sampling, step: _Step) -> None:
        """Nothing is awaited between its last token and the event: who reads that interrupts at a column that follows
        from tokens."""
        task = asyncio.current_task()
        assert task is not None
        try:
            await entry.samples[index].go_on(sampling, step.gate)
        finally:
            step.events.put_nowait((task, entry, index))

    def _emit(self, entry: Entry, step: _Step) -> list[Trajectory]:
        """The finished samples of the entry that are certain to be in the batch now, and were not before."""
        is_placed = entry.is_whole and step.may_have(entry)
        if not (is_placed or step.must_have(entry)):
            return []
        new = [entry.samples[i].trajectory for i in entry.done[entry.num_emitted :]]
        entry.num_emitted = len(entry.done)
        if is_placed:
            step.place(entry)
            self._pool.remove(entry)
        return [replace(t, group=step.groups[entry]) for t in new if t is not None]

    async def _pause(self, step: _Step, tasks: Sequence[asyncio.Task[None]]) -> None:
        """What goes on in an environment comes to its end; what is sampled is cut."""
        step.gate.is_open = False
        if any(not task.done() for task in tasks):
            await self._sampling.engine.interrupt()
        await asyncio.gather(*tasks)
