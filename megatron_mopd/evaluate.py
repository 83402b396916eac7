"""Evaluation: SFT policy, teachers and student on the same held-out prompts, cell by cell, by the environments'
verifiers.

A score is the share of prompts answered correctly and within the budget of the cell. The SFT policy and the student
read the effort level; a teacher is its effort level and reads none, as in training, and answers for its own cell
alone. Nobody scores log-probs here: no teacher is called.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from megatron_mopd import build
from megatron_mopd.config import Config
from megatron_mopd.errors import UserError
from megatron_mopd.hf_folder import read_hf_config
from megatron_mopd.mcore.layout import Layout
from megatron_mopd.preflight import check_budgets, check_environments_of, check_sampled_teachers
from megatron_mopd.prompts.files import read_prompts
from megatron_mopd.prompts.render import Renderer
from megatron_mopd.prompts.source import cell_pool
from megatron_mopd.rollout.sampler import Sampling, sample
from megatron_mopd.teachers.router import Router
from megatron_mopd.telemetry.cell_scores import CellScores, Measured
from megatron_mopd.telemetry.record import has_record, read_record
from megatron_mopd.telemetry.recovery import POLICIES
from megatron_mopd.telemetry.summary import print_summary, write_summary
from megatron_mopd.types import Cell, RenderedPrompt, Trajectory


def evaluate_run(config: Config) -> dict[str, Any]:
    """Evaluate RUN/student against where it came from; write and print RUN/summary.json.

    A student that was not trained there (merged weights) has no record, and so no reverse KL and no training time.
    """
    student = config.run.folder / "student"
    read_hf_config(student, "run.folder (its student/, which a finished training run leaves)")
    Router(config.teachers.models, config.prompts.cells)
    check_sampled_teachers(config)
    rows = read_record(config.run.folder) if has_record(config.run.folder) else []
    steps_s = sum(row["timing"].get("time/step_s") or 0.0 for row in rows)
    start = time.monotonic()
    renderer = Renderer.of_student(config)
    prompts = evaluation_prompts(config, renderer)
    with build.student_servers(config):
        scores = asyncio.run(_score_models(config, build.sampling(config, renderer.tokenizer), student, prompts))
    cells = [
        CellScores(cell.domain, cell.effort, *(scores[policy][cell] for policy in POLICIES))
        for cell in config.prompts.cells
    ]
    layout = {**asdict(Layout.from_table(config.megatron)), "processes": config.launch.num_processes}
    summary = write_summary(config.run.folder, cells, rows, wall_s=steps_s + time.monotonic() - start, layout=layout)
    print_summary(summary, Console())
    return summary


def evaluation_prompts(config: Config, renderer: Renderer) -> dict[Cell, list[RenderedPrompt]]:
    """The first `evaluation.prompts_per_cell` held-out prompts of each cell, the same for every model and seed of
    sampling."""
    if not config.prompts.eval_files:
        raise UserError("prompts.eval_files is empty; name files with held-out prompts")
    prompts = read_prompts(config.prompts.eval_files)
    check_environments_of(prompts, config)
    check_budgets(config, prompts)
    chosen = {}
    for cell in config.prompts.cells:
        pool = cell_pool(prompts, cell)[: config.evaluation.prompts_per_cell]
        chosen[cell] = renderer.render([replace(p, effort=cell.effort) for p in pool])
    return chosen


async def _score_models(
    config: Config, sampling: Sampling, student: Path, prompts: dict[Cell, list[RenderedPrompt]]
) -> dict[str, dict[Cell, Measured]]:
    """Scores of "sft", "teacher" and "student" in every cell, one engine taking the weights of eleven models in
    turn."""
    neutral = {c: [replace(p, student_ids=p.teacher_ids) for p in prompts[c]] for c in prompts}
    teacher_of = {teacher.cell: teacher.checkpoint for teacher in config.teachers.models}
    scores: dict[str, dict[Cell, Measured]] = {"sft": {}, "teacher": {}, "student": {}}
    version = 0
    try:
        await sampling.engine.start()
        for name, folder in (("sft", config.student.checkpoint), ("student", student)):
            await sampling.engine.update_weights(folder, version := version + 1)
            scores[name] = await _score_cells(prompts, sampling)
        for cell in prompts:
            await sampling.engine.update_weights(teacher_of[cell], version := version + 1)
            scores["teacher"] |= await _score_cells({cell: neutral[cell]}, sampling)
    finally:
        await sampling.engine.close()
    return scores


async def _score_cells(prompts: dict[Cell, list[RenderedPrompt]], sampling: Sampling) -> dict[Cell, Measured]:
    sampled: dict[Cell, list[Trajectory]] = {cell: [] for cell in prompts}
    everything = [p for cell_prompts in prompts.values() for p in cell_prompts]
    async for trajectory in sample(everything, sampling, suffix="@eval"):
        check_reward(trajectory)
        sampled[trajectory.prompt.prompt.cell].append(trajectory)
    return {cell: measured(of_cell) for cell, of_cell in sampled.items()}


def check_reward(trajectory: Trajectory) -> None:
    """A score is a share; training takes any reward."""
    outcome = trajectory.outcome
    if outcome is not None and not 0.0 <= outcome.reward <= 1.0:
        raise UserError(
            f"environment {trajectory.prompt.prompt.environment!r} gave trajectory {trajectory.id} the reward "
            f"{outcome.reward:g}, and mopd eval counts rewards from 0 (wrong) to 1 (correct); name an environment with "
            "such rewards"
        )


def measured(trajectories: Sequence[Trajectory]) -> Measured:
    """A tool call is a stretch that the environment answered with tokens."""
    outcomes = [t.outcome for t in trajectories if t.outcome is not None]
    assert len(outcomes) == len(trajectories), "the sampler attaches the environment's outcome"
    calls = [sum(s.finish_reason == "observation" for s in t.segments) for t in trajectories]
    return Measured(
        score=float(np.mean([o.reward_within_budget for o in outcomes])),
        accuracy=float(np.mean([o.reward for o in outcomes])),
        spent_tokens=float(np.mean([o.spent_tokens for o in outcomes])),
        tool_calls=float(np.mean(calls)),
        prompts=len(trajectories),
    )
