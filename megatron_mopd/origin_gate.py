"""What `mopd preflight` does beyond reading files: a few trajectories of each cell from the initial student, sampled
and scored where the run would do it, and the same-origin gate on them.

It starts the servers that the configuration asks for and ends them, so it also shows that every endpoint answers and
has the right model. It trains nothing and keeps no trajectory.

Promise (tests/e2e/test_origin_gate.py): teachers of another origin are refused with what was measured, after a table of
all teachers.
"""

from __future__ import annotations

import asyncio

from megatron_mopd import build
from megatron_mopd.config import Config
from megatron_mopd.prompts.files import read_prompts
from megatron_mopd.prompts.render import Renderer
from megatron_mopd.prompts.source import PromptSource
from megatron_mopd.rollout.sampler import sample
from megatron_mopd.teachers.origin import check_origin, measure, origin_table
from megatron_mopd.teachers.router import Router
from megatron_mopd.trajectory_file import Sampled
from megatron_mopd.types import Graded


def hold_gate(config: Config) -> None:
    """Print the initial KL of every teacher. Raises UserError where one is above the gate, or cannot be measured.
    Nothing happens where no teacher is learnt from: a reference policy may be as far away as it likes."""
    if not config.objective.distils:
        return
    few = with_few_prompts(config)
    with build.servers(few):
        graded = asyncio.run(_grade(few))
    print(origin_table(measure(graded), config), flush=True)
    check_origin(graded, config)


def with_few_prompts(config: Config) -> Config:
    """The same with a batch of `teachers.origin_prompts` prompts of every cell, whatever its share of the mixture."""
    prompts = config.prompts
    equal_shares = {
        "batch_size": config.teachers.origin_prompts * len(prompts.cells),
        "mixture": dict.fromkeys(prompts.mixture, 1.0),
        "efforts": dict.fromkeys(prompts.efforts, 1.0),
    }
    every_lane = {"max_lag_steps": 0}
    return config.model_copy(
        update={
            "prompts": prompts.model_copy(update=equal_shares),
            "teachers": config.teachers.model_copy(update=every_lane),
        }
    )


async def _grade(config: Config) -> list[Graded]:
    """The driver's first step, without the store."""
    renderer = Renderer.of_student(config)
    source = PromptSource(read_prompts(config.prompts.files), config.prompts, config.run.seed)
    router = Router(config.teachers.models, config.prompts.cells)
    sampling, lanes = build.sampling(config, renderer.tokenizer), build.teacher_lanes(config)
    try:
        await asyncio.gather(sampling.engine.start(), lanes.start())
        async for trajectory in sample(renderer.render(source.draw(0)), sampling, suffix="@preflight"):
            lanes.submit(router.route(trajectory.prompt.prompt.cell), Sampled(trajectory, 0))
        return await lanes.drain(0)
    finally:
        await sampling.engine.close()
        await lanes.close()
