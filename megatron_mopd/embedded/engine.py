"""The student as a rollout engine in this process: batched sampling with a key-value cache, on transformers.

Promises (tests/contract/test_engine.py):

- Log-probs are those of softmax(logits / temperature) over the whole vocabulary, before top-p.
- The noise of a token belongs to (seed, trajectory, position), so interrupting a trajectory and resuming it samples
  the same tokens. Its past is kept or computed again; the log-probs agree to float32 precision.
- The same requests give the same bits, whatever else this process computes meanwhile. Rounding depends on which rows
  are computed together, so that must follow from tokens alone: a wave is all that waits, in order of arrival; the
  futures of rows that end are resolved in row order; then the event loop turns once, and asyncio wakes the callers in
  that same order. A caller who answers without awaiting anything else has its next request waiting when the engine
  looks, and its row goes on in place. A caller who awaits something real, a sandbox, joins the next wave: the same
  tokens up to rounding.
- A wave ends on the weights it began with. Requests taken up after `update_weights` carry the new version.
- `interrupt` ends a wave at the column that it has reached. Without `retain_kv` the wave is dropped, and with it all
  keys and values of its weights. With it the rows stay: a trajectory that goes on does so in place, under the weights
  of then, and its segments say how old its keys and values may be; what is new joins them (wave.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from megatron_mopd.embedded.models import load_model
from megatron_mopd.embedded.wave import Distribution, Job, Wave
from megatron_mopd.protocols import KvUse, SampleRequest
from megatron_mopd.types import Segment


class EmbeddedEngine:
    """Implements protocols.RolloutEngine. It computes in one thread of its own, so the event loop stays free."""

    def __init__(
        self,
        folder: Path,
        *,
        seed: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        max_batch_size: int = 1024,
        num_threads: int = 1,
        weight_version: int = 0,
        retain_kv: bool = False,
    ):
        self.weight_version, self.kv = weight_version, KvUse()
        self._model = load_model(folder)
        self._distribution = Distribution(seed, temperature, top_p)
        self._max_batch_size = max_batch_size
        self._thread = ThreadPoolExecutor(1, "engine", initializer=torch.set_num_threads, initargs=(num_threads,))
        self._waiting: list[Job] = []
        self._wave: Wave | None = None
        self._retain_kv, self._interrupted = retain_kv, False
        self._kept: Wave | None = None
        """What was interrupted, with its keys and values."""
        self._loop_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """The weights were loaded at construction."""

    async def generate(self, request: SampleRequest) -> Segment:
        if not request.token_ids or request.max_new_tokens < 1:
            raise ValueError(
                f"{request.trajectory_id}: cannot sample {request.max_new_tokens} tokens after {len(request.token_ids)}"
            )
        job = Job(request, asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        if self._loop_task is None or self._loop_task.done():
            self._loop_task = asyncio.create_task(self._run_waves())
        return await job.future

    async def update_weights(self, folder: Path | None, weight_version: int) -> None:
        """Load `folder`. If that fails, or the version goes backwards, the engine keeps the weights that it has."""
        if weight_version < self.weight_version:
            raise ValueError(f"weights of version {weight_version} offered after version {self.weight_version}")
        assert folder is not None, "nobody but this process can write to its weights"
        model = await asyncio.get_running_loop().run_in_executor(self._thread, load_model, folder)
        self._model, self.weight_version = model, weight_version

    async def interrupt(self) -> None:
        """It takes effect between two columns."""
        if self._loop_task is None or self._loop_task.done():
            return
        self._interrupted = True
        await asyncio.wait([self._loop_task])
        self._interrupted = False

    async def close(self) -> None:
        """Stop sampling; callers who still wait are cancelled."""
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.wait([self._loop_task])
        for job in self._unfinished():
            job.future.cancel()
        self._thread.shutdown()

    async def _run_waves(self) -> None:
        try:
            while self._waiting and not self._interrupted:
                self._wave = self._next_wave()
                while self._wave.jobs and not self._interrupted:
                    await self._step(self._wave)
            if self._interrupted:
                self._let_go()
        except Exception as error:  # not swallowed: it is raised by every `generate` that waits
            for job in self._unfinished():
                job.future.set_exception(error)
            self._waiting = []
        self._wave = None

    def _next_wave(self) -> Wave:
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.renew(self._model, self.weight_version)
            held = kept.num_tokens
            reused = self._continue_in_place(kept, range(len(kept.jobs)))
            self.kv.reused += reused
            self.kv.evicted += held - reused
            kept.drop_ended()
            if kept.jobs:
                kept.join(self._take(self._max_batch_size - len(kept.jobs)))
                return kept
        return Wave(self._model, self.weight_version, self._distribution, self._take(self._max_batch_size))

    def _take(self, count: int) -> list[Job]:
        """Of those that wait, the first."""
        jobs, self._waiting = self._waiting[:count], self._waiting[count:]
        return jobs

    def _let_go(self) -> None:
        """What is in flight returns what it has."""
        if self._wave is not None:
            unfinished = [row for row, job in enumerate(self._wave.jobs) if not job.future.done()]
            for row in unfinished:
                self._wave.jobs[row].future.set_result(self._wave.segment(row, interrupted=True))
            if self._retain_kv and self._wave.is_prefilled:
                self._wave.keep(unfinished)
                self._kept = self._wave
                self.kv.retained += self._wave.num_tokens
        for job in self._waiting:
            if not job.future.done():
                job.future.set_result(Segment((), (), (), self.weight_version, "abort"))
        self._waiting = []

    async def _step(self, wave: Wave) -> None:
        ended = await asyncio.get_running_loop().run_in_executor(self._thread, wave.advance)
        for row in ended:
            if not wave.jobs[row].future.done():  # a caller may have gone away
                wave.jobs[row].future.set_result(wave.segment(row))
        if ended:
            await asyncio.sleep(0)  # the callers run now, in row order
            if wave.weight_version == self.weight_version:
                self._continue_in_place(wave, ended)
            wave.drop_ended()

    def _continue_in_place(self, wave: Wave, rows: Sequence[int]) -> int:
        """Give these rows their next requests, of those that wait; return the tokens that need not be computed."""
        row_of = {wave.jobs[row].request.trajectory_id: row for row in rows}
        waiting, tokens = self._waiting, 0
        self._waiting = []
        for job in waiting:
            row = row_of.get(job.request.trajectory_id)
            held = 0 if row is None else wave.go_on(row, job)
            tokens += held
            if not held:
                self._waiting.append(job)
        return tokens

    def _unfinished(self) -> list[Job]:
        jobs = self._waiting + (self._wave.jobs if self._wave is not None else [])
        return [job for job in jobs if not job.future.done()]
