"""One flat row of registered metrics per step, from what the learner and the driver know of it.

Promise: a number that nothing was measured for (a cell without trained tokens, a run without rollouts) is absent, never
zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_mopd.step_metrics import CellMetrics, Mean, StepMetrics, WeightBytes
from megatron_mopd.telemetry.registry import cell_key, check_row
from megatron_mopd.types import Cell

ROLLOUT_MEANS = ("reward", "reward_within_budget", "spent_tokens", "response_tokens", "truncated_fraction")
QUANTIZATION = ("error", "changed", "clipped_blocks", "saturated")
BY_AGE = ("stale_share", "stale_kv_share", "oldest", "version_span")
SOME_ROLLOUT_MEANS = ("over_budget", "training_reward", "even_groups")
"""Of cells that have a budget, and of objectives that compare outcomes."""


def step_row(learner: StepMetrics, rollout: Mapping[str, Any] | None, seconds: Mapping[str, float]) -> dict[str, float]:
    """Flatten one step to {metric name: number}.

    `rollout` is the driver's `rollout.json` (see rollout/measure.py), None when the batch was demonstrations, which
    have no teacher either. `seconds` are the trainer's own: step, and any of wait, update, sync.
    """
    has_teacher = learner.has_teacher and rollout is not None
    row = {
        "train/loss": learner.loss,
        "train/grad_norm": learner.grad_norm,
        "train/learning_rate": learner.learning_rate,
        "train/tokens": float(learner.loss_tokens),
        "train/entropy": learner.mean("entropy"),
        "train/logit_grad_norm": learner.logit_grad_norm,
        "perf/tokens_per_s": learner.num_tokens / seconds["step"],
        **{f"time/{name}_s": value for name, value in seconds.items()},
        **_cell_rows(learner, rollout is not None, has_teacher),
    }
    if rollout is not None:
        row |= {f"train/{name}": value for name, value in _measured_means(learner, has_teacher).items()}
        row |= _rollout_row(rollout)
        row |= _sync_row(learner.weight_bytes)
    if has_teacher:
        row |= _teacher_row(learner)
    if (quantized := learner.quantization) is not None:
        row |= {f"quantization/{name}": getattr(quantized, name) for name in QUANTIZATION}
        row |= {f"layer/{i}/quantization_error": error for i, error in quantized.error_of_layer.items()}
    check_row(row)
    return row


def _sync_row(weights: WeightBytes | None) -> dict[str, float]:
    """One size alone where nothing is quantized."""
    if weights is None:
        return {}
    row = {"sync/bytes": float(weights.sent)}
    return row if weights.packed == weights.sent else {**row, "sync/packed_bytes": float(weights.packed)}


def _teacher_row(learner: StepMetrics) -> dict[str, float]:
    return {
        "train/reverse_kl": learner.mean("reverse_kl"),
        "train/clip_fraction": learner.mean("clip_fraction"),
        "train/masked_tokens": float(sum(c.masked_tokens for c in learner.cells.values())),
    }


def _measured_means(metrics: StepMetrics | CellMetrics, has_teacher: bool) -> dict[str, float]:
    """What is measured of fewer things than the trained tokens; without that of nothing."""
    named = {"mismatch_mean": metrics.mismatch, "mismatch_kl": metrics.mismatch_kl}
    named["mismatch_max"] = Mean(metrics.mismatch_max, metrics.mismatch.count)
    named |= {f"mismatch_quarter_{i}": mean for i, mean in enumerate(metrics.mismatch_quarters, start=1)}
    named |= {f"drift_{age}": mean for age, mean in enumerate(metrics.drift_by_age, start=1)}
    if has_teacher:
        named |= {f"reverse_kl_decile_{i}": mean for i, mean in enumerate(metrics.reverse_kl_deciles, start=1)}
    named |= {"route_agreement": metrics.route_agreement, "kl": metrics.kl}
    named |= {f"ratio_{what}": getattr(metrics, f"ratio_{what}") for what in ("clipped", "masked", "truncated")}
    return {name: mean.value for name, mean in named.items() if mean.count}


def _cell_rows(learner: StepMetrics, was_sampled: bool, has_teacher: bool) -> dict[str, float]:
    row = _share_rows(learner, has_teacher)
    for cell, metrics in learner.cells.items():
        row[cell_key(cell, "tokens")] = float(metrics.tokens)
        row[cell_key(cell, "weight")] = metrics.weight
        if metrics.tokens:
            row[cell_key(cell, "entropy")] = metrics.entropy
            row[cell_key(cell, "logit_grad_norm")] = metrics.logit_grad_norm
        if metrics.tokens and was_sampled:
            row |= {cell_key(cell, name): value for name, value in _measured_means(metrics, has_teacher).items()}
        if metrics.tokens and has_teacher:
            row[cell_key(cell, "reverse_kl")] = metrics.reverse_kl
            row[cell_key(cell, "clip_fraction")] = metrics.clip_fraction
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


def _partial_row(partial: Mapping[str, Any] | None) -> dict[str, float]:
    """Of rollouts that were interrupted, or could have been."""
    if not partial or not (partial["in_flight"] or partial["surplus"] or partial["interrupted"]):
        return {}
    row = {f"rollout/{name}": partial[name] for name in ("in_flight", "in_flight_tokens", "surplus")}
    row |= {f"rollout/interrupted_{reason}": count for reason, count in partial["interrupted"].items()}
    if any(partial["kv"].values()):
        row |= {f"rollout/kv_{name}": tokens for name, tokens in partial["kv"].items()}
    return row


def _rollout_row(rollout: Mapping[str, Any]) -> dict[str, float]:
    cells: Mapping[str, Mapping[str, float]] = rollout["cells"]
    row = {f"rollout/{name}": rollout[name] for name in ("staleness", "unscored", *BY_AGE) if name in rollout}
    row |= _partial_row(rollout.get("partial"))
    row |= {f"time/{name}_s": value for name, value in rollout["seconds"].items()}
    for name in (*ROLLOUT_MEANS, *SOME_ROLLOUT_MEANS):
        known = [c for c in cells.values() if name in c or name in ROLLOUT_MEANS]
        if total := sum(c["trajectories"] for c in known):
            # fsum: the same bits whatever the order in which the driver met the cells
            row[f"rollout/{name}"] = math.fsum(c[name] * c["trajectories"] for c in known) / total
    for cell, means in cells.items():
        domain, effort = cell.rsplit("/", 1)
        row |= {cell_key(Cell(domain, effort), name): value for name, value in means.items() if name != "trajectories"}
    return row
