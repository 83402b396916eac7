"""One flat row of registered metrics per step, from what the learner and the driver know of it.

Promise: a number that nothing was measured for (a cell without trained tokens, a run without rollouts) is absent, never
zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_mopd.step_metrics import CellMetrics, Mean, StepMetrics
from megatron_mopd.telemetry.registry import cell_key, check_row
from megatron_mopd.types import Cell

ROLLOUT_MEANS = ("reward", "reward_within_budget", "spent_tokens", "response_tokens", "truncated_fraction")


def step_row(learner: StepMetrics, rollout: Mapping[str, Any] | None, seconds: Mapping[str, float]) -> dict[str, float]:
    """Flatten one step to {metric name: number}.

    `rollout` is the driver's `rollout.json` (see driver.rollout_metrics), None when the batch was demonstrations, which
    have no teacher either. `seconds` are the trainer's own: step, and any of wait, update, sync.
    """
    row = {
        "train/loss": learner.loss,
        "train/grad_norm": learner.grad_norm,
        "train/learning_rate": learner.learning_rate,
        "train/tokens": float(learner.loss_tokens),
        "train/entropy": learner.mean("entropy"),
        "train/logit_grad_norm": learner.logit_grad_norm,
        "perf/tokens_per_s": learner.num_tokens / seconds["step"],
        **{f"time/{name}_s": value for name, value in seconds.items()},
        **_cell_rows(learner, with_teacher=rollout is not None),
    }
    if rollout is not None:
        row |= _teacher_row(learner) | _rollout_row(rollout)
    check_row(row)
    return row


def _teacher_row(learner: StepMetrics) -> dict[str, float]:
    return {
        "train/reverse_kl": learner.mean("reverse_kl"),
        "train/clip_fraction": learner.mean("clip_fraction"),
        **{f"train/{name}": value for name, value in _measured_means(learner).items()},
        "train/masked_tokens": float(sum(c.masked_tokens for c in learner.cells.values())),
    }


def _measured_means(metrics: StepMetrics | CellMetrics) -> dict[str, float]:
    """What is measured of fewer things than the trained tokens; without that of nothing."""
    named = {"mismatch_mean": metrics.mismatch, "mismatch_kl": metrics.mismatch_kl}
    named["mismatch_max"] = Mean(metrics.mismatch_max, metrics.mismatch.count)
    named |= {f"mismatch_quarter_{i}": mean for i, mean in enumerate(metrics.mismatch_quarters, start=1)}
    named |= {f"reverse_kl_decile_{i}": mean for i, mean in enumerate(metrics.reverse_kl_deciles, start=1)}
    named |= {"route_agreement": metrics.route_agreement, "kl": metrics.kl}
    return {name: mean.value for name, mean in named.items() if mean.count}


def _cell_rows(learner: StepMetrics, with_teacher: bool) -> dict[str, float]:
    row = _share_rows(learner, with_teacher)
    for cell, metrics in learner.cells.items():
        row[cell_key(cell, "tokens")] = float(metrics.tokens)
        row[cell_key(cell, "weight")] = metrics.weight
        if metrics.tokens:
            row[cell_key(cell, "entropy")] = metrics.entropy
            row[cell_key(cell, "logit_grad_norm")] = metrics.logit_grad_norm
        if metrics.tokens and with_teacher:
            row[cell_key(cell, "reverse_kl")] = metrics.reverse_kl
            row[cell_key(cell, "clip_fraction")] = metrics.clip_fraction
            row |= {cell_key(cell, name): value for name, value in _measured_means(metrics).items()}
    return row


def _share_rows(learner: StepMetrics, with_teacher: bool) -> dict[str, float]:
    """What each cell has of the batch; without the shares of what the batch has nothing of."""
    amounts = {
        "prompt_share": [float(c.trajectories) for c in learner.cells.values()],
        "token_share": [float(c.tokens) for c in learner.cells.values()],
        "grad_share": [c.logit_grad_norm**2 for c in learner.cells.values()],
    }
    if with_teacher:
        amounts["clipped_share"] = [c.clip_fraction * c.tokens for c in learner.cells.values()]
    return {
        cell_key(cell, name): amount / sum(of_cells)
        for name, of_cells in amounts.items()
        for cell, amount in zip(learner.cells, of_cells, strict=True)
        if sum(of_cells)
    }


def _rollout_row(rollout: Mapping[str, Any]) -> dict[str, float]:
    cells: Mapping[str, Mapping[str, float]] = rollout["cells"]
    total = sum(c["trajectories"] for c in cells.values())
    row = {"rollout/staleness": rollout["staleness"], "rollout/unscored": rollout["unscored"]}
    row |= {f"time/{name}_s": value for name, value in rollout["seconds"].items()}
    for name in ROLLOUT_MEANS:
        # fsum: the same bits whatever the order in which the driver met the cells
        row[f"rollout/{name}"] = math.fsum(c[name] * c["trajectories"] for c in cells.values()) / max(1, total)
        for cell, means in cells.items():
            domain, effort = cell.rsplit("/", 1)
            row[cell_key(Cell(domain, effort), name)] = means[name]
    return row
