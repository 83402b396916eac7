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
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from megatron_mopd.embedded.models import load_model
from megatron_mopd.embedded.wave import Distribution, Job, Wave
from megatron_mopd.protocols import SampleRequest
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
    ):
        self.weight_version = weight_version
        self._model = load_model(folder)
        self._distribution = Distribution(seed, temperature, top_p)
        self._max_batch_size = max_batch_size
        self._thread = ThreadPoolExecutor(1, "engine", initializer=torch.set_num_threads, initargs=(num_threads,))
        self._waiting: list[Job] = []
        self._wave: Wave | None = None
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
            while self._waiting:
                jobs, self._waiting = self._waiting[: self._max_batch_size], self._waiting[self._max_batch_size :]
                self._wave = Wave(self._model, self.weight_version, self._distribution, jobs)
                while self._wave.jobs:
                    await self._step(self._wave)
        except Exception as error:  # not swallowed: it is raised by every `generate` that waits
            for job in self._unfinished():
                job.future.set_exception(error)
            self._waiting = []
        self._wave = None

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

    def _continue_in_place(self, wave: Wave, ended: list[int]) -> None:
        row_of = {wave.jobs[row].request.trajectory_id: row for row in ended}
        self._waiting = [
            job
            for job in self._waiting
            if job.request.trajectory_id not in row_of or not wave.go_on(row_of[job.request.trajectory_id], job)
        ]

    def _unfinished(self) -> list[Job]:
        jobs = self._waiting + (self._wave.jobs if self._wave is not None else [])
        return [job for job in jobs if not job.future.done()]
