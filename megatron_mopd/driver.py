"""The driver's loop: draw, sample, route, score, in a process of its own.

    for each step:  prompts -> trajectories -> teacher of (domain, effort) -> one log-prob per token -> trajectory store

Rank 0 of the trainer starts it (`link.DriverProcess`) and asks for one step at a time; it ends when the trainer's
end of the socket closes. Promise: the batch of a step follows from the configuration, the step and the weights alone.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron_mopd import build
from megatron_mopd.config import Config, load_config
from megatron_mopd.demonstrator import Demonstrator
from megatron_mopd.errors import UserError
from megatron_mopd.link import Link, StepRequest
from megatron_mopd.objectives.advantages import outcome_advantages
from megatron_mopd.rollout.budget import taus_at
from megatron_mopd.rollout.measure import rollout_metrics
from megatron_mopd.rollout.sampler import Rollout
from megatron_mopd.rollout.token_log import Cut
from megatron_mopd.teachers.origin import check_late, check_origin
from megatron_mopd.trajectory_file import Sampled
from megatron_mopd.types import Graded, RenderedPrompt, Trajectory


class Driver:
    """The four steps of the loop that need no gradient."""

    def __init__(self, parts: build.DriverParts) -> None:
        self.parts, self.store = parts, parts.store
        self.pool: Cut | None = None
        """Where the token log holds what the last step left in flight."""
        self._has_taken_up = False

    async def start(self) -> None:
        await asyncio.gather(self.parts.sampling.engine.start(), self.parts.lanes.start())

    async def close(self) -> None:
        await self.parts.sampling.engine.close()
        await self.parts.lanes.close()

    async def step(self, request: StepRequest) -> None:
        """Put the graded batch of `request.step`, sampled from `request.weights`, into the store."""
        p, seconds = self.parts, {}
        with self.timed("load", request, seconds):
            folder = None if request.weights is None else Path(request.weights)
            await p.sampling.engine.update_weights(folder, request.weight_version)
        with self.timed("sample", request, seconds):
            if not self.take_up(request.step):
                await self.sample(request)
        with self.timed("score", request, seconds):
            graded = await self.drain(request)
        if p.config.objective.distils:
            self.check_origin(request.step, graded)
        advantage = None
        if p.config.objective.needs_outcomes:
            advantage = outcome_advantages([g.trajectory for g in graded], p.config.objective.advantage)
        metrics = rollout_metrics(
            graded, p.config, request.step, request.weight_version, seconds, num_unscored=len(p.lanes.held)
        ) | {"partial": p.scheduler.report}
        p.store.write(request.step, graded, p.config.prompts.cells, metrics, p.lanes.held, advantage, self.pool)
        p.token_log.drop_before(p.store.first_needed(request.step))

    def check_origin(self, step: int, graded: Sequence[Graded]) -> None:
        if step == 0:
            print(check_origin(graded, self.parts.config), file=sys.stderr, flush=True)
        else:
            check_late(graded, self.parts.config)

    async def look_ahead(self, step: int) -> None:
        """The next step is sampled from weights that are still to come."""

    async def sample(self, request: StepRequest) -> None:
        p = self.parts
        certain = p.scheduler.begin(request.step) or ()  # 1 DRAW
        per_prompt = p.config.prompts.samples_per_prompt
        p.lanes.expect(Counter(self.teacher_of(prompt) for prompt in certain for _ in range(per_prompt)))
        async for trajectory in p.scheduler.run(taus_at(p.config, request.step)):  # 2 SAMPLE
            self.route(Sampled(trajectory, request.weight_version))  # 3 ROUTE
        self.pool = await p.scheduler.write(p.token_log, request.step)

    async def drain(self, request: StepRequest) -> list[Graded]:
        """What a lane that gives up leaves behind is kept for whoever takes the step up again."""
        try:
            return await self.parts.lanes.drain(request.weight_version)
        except UserError:
            self.parts.store.keep(request.step, self.parts.lanes.held, self.pool)
            raise

    def route(self, sampled: Sampled) -> None:
        teacher = self.teacher_of(sampled.trajectory.prompt)
        self.parts.lanes.submit(teacher, sampled)  # 4 SCORE, from now on, behind the sampling of the others

    def teacher_of(self, prompt: RenderedPrompt) -> str:
        return self.parts.router.route(prompt.prompt.cell)

    @contextmanager
    def timed(self, name: str, request: StepRequest, seconds: dict[str, float]) -> Iterator[None]:
        start = time.monotonic()
        with self.parts.trace.span(name, "step", step=request.step):
            yield
        seconds[name] = time.monotonic() - start

    def take_up(self, step: int) -> bool:
        """Once: take up what an earlier process left behind, in lanes and in flight; True if the whole batch of this
        step was among it."""
        if self._has_taken_up:
            return False
        self._has_taken_up = True
        kept = self.parts.store.kept(step)
        left = kept or self.parts.store.unscored(step - 1)
        check_cells([sampled.trajectory for sampled in left], self.parts.config)
        for sampled in left:
            self.route(sampled)
        self.restore(step if kept else step - 1)
        return bool(kept)

    def restore(self, step: int) -> None:
        """Take up what `step` left in flight."""
        p = self.parts
        self.pool = p.store.pool_after(step)
        p.token_log.drop_after(step)
        if self.pool is not None:
            p.scheduler.restore(p.token_log, self.pool)
            check_cells([sample for entry in p.scheduler.pool for sample in entry.samples], p.config)


def check_cells(left: Sequence[Trajectory | Rollout], config: Config) -> None:
    """UserError where what an earlier process left behind is of a cell that this run does not have."""
    for trajectory in left:
        cell, name = trajectory.prompt.prompt.cell, trajectory.id
        if cell not in config.prompts.cells:
            raise UserError(
                f"trajectory {name} in {config.run.folder}/trajectories waits for the teacher of {cell}, which is no "
                "longer in prompts.mixture / prompts.efforts; put it back until the trajectory has been trained on, or "
                "remove the newest *.sampled, unscored.safetensors or pool.json there, which loses all that wait"
            )


def driver_of(config: Config, link: Link) -> Driver | Demonstrator:
    """Demonstrations are drawn like prompts, and then there is nothing to do but to render them."""
    if config.objective.name == "sft":
        return Demonstrator(build.demonstrator_parts(config))
    return Driver(build.driver_parts(config, link.fetch_weights))


async def serve(config: Config, link: Link) -> None:
    """Answer step requests until the trainer hangs up; a step that cannot be made is answered with its reason."""
    try:
        driver = driver_of(config, link)
    except UserError as error:
        return await _refuse(link, error)
    try:
        try:
            await driver.start()
        except UserError as error:
            return await _refuse(link, error)
        while (request := await link.receive()) is not None:
            if not driver.store.has(request.step):
                try:
                    await driver.step(request)
                except UserError as error:
                    await _refuse(link, error, request)
                    continue
            await link.reply(request.step)
            await driver.look_ahead(request.step + 1)
    finally:
        await driver.close()


async def _refuse(link: Link, error: UserError, request: StepRequest | None = None) -> None:
    """Answer a request, the next one if there is none yet, with the reason; what led to it goes to driver.log."""
    traceback.print_exception(error)
    request = request or await link.receive()
    if request is not None:
        await link.reply(request.step, error=str(error))


def main() -> None:
    """`python -m megatron_mopd.driver RUN_FOLDER SOCKET_FD`: started by rank 0, not by hand."""
    run_folder, fd = Path(sys.argv[1]), int(sys.argv[2])
    config = load_config([run_folder / "config.yaml"])

    async def run() -> None:
        link = await Link.open(fd)
        watch = asyncio.create_task(link.closed())
        work = asyncio.create_task(serve(config, link))
        await asyncio.wait({watch, work}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
        os._exit(0)  # the trainer is gone: do not wait for a worker thread in the middle of a batch

    asyncio.run(run())


if __name__ == "__main__":
    main()
