"""`mopd sample-teachers`: what the teachers answer by themselves, to be learnt from off-policy.

The prompts are those that a run of the same configuration would draw in its run.num_steps steps, as often, each
answered by the teacher of its cell, which reads no effort. RUN/samples/<teacher>.safetensors holds the trajectories,
tokens and all; demonstrations.files of a run with objective.name=sft takes them, and its student does read the effort.
So off-policy and on-policy distillation have the same prompts, mixture and number of trajectories.

Promises (tests/e2e/test_teacher_samples.py): files appear whole, and those that are there are kept, so that a second
call goes on; a folder that was begun with another configuration is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from megatron_mopd import build
from megatron_mopd.config import Config, Teacher
from megatron_mopd.errors import UserError
from megatron_mopd.prompts.files import read_prompts
from megatron_mopd.prompts.render import Renderer
from megatron_mopd.prompts.source import PromptSource
from megatron_mopd.rollout.sampler import Sampling, sample
from megatron_mopd.teachers.router import Router
from megatron_mopd.telemetry.record import replace_file
from megatron_mopd.trajectory_file import Sampled, write_trajectories
from megatron_mopd.types import Prompt, RenderedPrompt

PROMPTS_AT_ONCE = 512
DECISIVE: Any = {
    "run": {"seed", "num_steps"},
    "teachers": {"models"},
    **dict.fromkeys(("student", "prompts", "environments", "rollout"), True),
}
"""The tables of the configuration from which the samples follow."""


def write_samples(config: Config) -> list[Path]:
    """Sample what is not there yet; the files of all teachers, in the order of teachers.models."""
    Router(config.teachers.models, config.prompts.cells)  # every cell has its teacher
    files = {teacher.name: samples_file(config, teacher) for teacher in wanted_teachers(config)}
    _claim_folder(config)
    if any(not file.exists() for file in files.values()):
        renderer = Renderer.of_student(config)
        sampling = build.sampling(config, renderer.tokenizer)
        with build.student_servers(config):
            asyncio.run(_sample_teachers(config, sampling, renderer, files))
    return list(files.values())


def wanted_teachers(config: Config) -> list[Teacher]:
    """Those of the cells that are drawn."""
    return [teacher for teacher in config.teachers.models if teacher.cell in config.prompts.cells]


def samples_file(config: Config, teacher: Teacher) -> Path:
    return _folder(config) / f"{quote(teacher.name, safe=' ')}.safetensors"


def drawn_prompts(config: Config) -> list[Prompt]:
    """Of all steps, one after the other."""
    source = PromptSource(read_prompts(config.prompts.files), config.prompts, config.run.seed)
    return [prompt for step in range(config.run.num_steps) for prompt in source.draw(step)]


def _folder(config: Config) -> Path:
    return config.run.folder / "samples"


def _claim_folder(config: Config) -> None:
    """Its config.yaml has what the samples follow from."""
    record, ours = _folder(config) / "config.yaml", config.model_dump(mode="json", include=DECISIVE)
    theirs = yaml.safe_load(record.read_text()) if record.is_file() else ours
    if differs := [table for table in ours if ours[table] != theirs.get(table)]:
        raise UserError(
            f"{record.parent} was begun with another table {differs[0]!r}, see its config.yaml; choose another "
            "run.folder, or remove it"
        )
    record.parent.mkdir(parents=True, exist_ok=True)
    replace_file(record, yaml.safe_dump(ours))


async def _sample_teachers(config: Config, sampling: Sampling, renderer: Renderer, files: dict[str, Path]) -> None:
    """One engine takes the weights of one teacher after the other."""
    drawn = drawn_prompts(config)
    try:
        await sampling.engine.start()
        for version, teacher in enumerate(wanted_teachers(config), start=1):
            if (file := files[teacher.name]).exists():
                continue
            await sampling.engine.update_weights(teacher.checkpoint, version)
            rendered = renderer.render([prompt for prompt in drawn if prompt.cell == teacher.cell])
            sampled = await _sample_teacher(rendered, sampling, teacher.name, config.prompts.samples_per_prompt)
            partial = file.with_suffix(".partial")
            write_trajectories(partial, sampled)
            partial.replace(file)
    finally:
        await sampling.engine.close()


async def _sample_teacher(
    prompts: Sequence[RenderedPrompt], sampling: Sampling, name: str, samples_per_prompt: int
) -> list[Sampled]:
    sampled = []
    for start in range(0, len(prompts), PROMPTS_AT_ONCE):
        some = prompts[start : start + PROMPTS_AT_ONCE]
        neutral = [replace(prompt, student_ids=prompt.teacher_ids) for prompt in some]
        async for trajectory in sample(neutral, sampling, f"@{name}-{start}", samples_per_prompt):
            sampled.append(Sampled(replace(trajectory, prompt=some[trajectory.group]), weight_version=0))
    return sampled
