"""What the driver knows of a step, for `rollout.json`: means per cell, staleness, wall seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_mopd.config import Config
from megatron_mopd.objectives.advantages import by_group, training_reward
from megatron_mopd.rollout.budget import taus_at
from megatron_mopd.types import Cell, Graded, Trajectory


def rollout_metrics(
    graded: Sequence[Graded],
    config: Config,
    step: int,
    weight_version: int,
    seconds: Mapping[str, float],
    num_unscored: int = 0,
) -> dict[str, Any]:
    """`seconds`: load, sample, and score, the wait after sampling had ended."""
    by_cell: dict[Cell, list[Trajectory]] = {}
    for g in graded:
        by_cell.setdefault(g.trajectory.prompt.prompt.cell, []).append(g.trajectory)
    versions = np.concatenate([g.trajectory.weight_versions[g.trajectory.loss_mask] for g in graded])
    taus = taus_at(config, step)
    return {
        "cells": {
            str(cell): _cell_metrics(ts)
            | ({"tau": taus[cell]} if cell in taus else {})
            | (_comparison(ts) if config.objective.needs_outcomes else {})
            for cell, ts in by_cell.items()
        },
        "staleness": float(np.mean(weight_version - versions)) if len(versions) else 0.0,
        "stale_share": float(np.mean(versions < weight_version)) if len(versions) else 0.0,
        "stale_kv_share": _stale_kv_share([g.trajectory for g in graded]),
        "oldest": float(weight_version - versions.min()) if len(versions) else 0.0,
        "version_span": max(_version_span(g.trajectory) for g in graded),
        "seconds": dict(seconds),
        "unscored": num_unscored,
    }


def _stale_kv_share(trajectories: Sequence[Trajectory]) -> float:
    """Sampled tokens that attended to keys and values of weights older than their own."""
    sampled = [s for t in trajectories for s in t.segments if any(s.loss_mask)]
    total = sum(len(s.token_ids) for s in sampled)
    return sum(len(s.token_ids) for s in sampled if s.kv_version is not None) / max(1, total)


def _version_span(trajectory: Trajectory) -> int:
    versions = [s.weight_version for s in trajectory.segments if any(s.loss_mask)]
    return max(versions) - min(versions) if versions else 0


def _cell_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    outcomes = [t.outcome for t in trajectories if t.outcome is not None]
    budgeted = [o for o in outcomes if o.budget_tokens is not None]
    return {
        "trajectories": len(trajectories),
        "reward": float(np.mean([o.reward for o in outcomes])),
        "reward_within_budget": float(np.mean([o.reward_within_budget for o in outcomes])),
        "spent_tokens": float(np.mean([o.spent_tokens for o in outcomes])),
        "response_tokens": float(np.mean([len(t.response_ids) for t in trajectories])),
        "truncated_fraction": float(np.mean([t.finish_reason == "length" for t in trajectories])),
        **({"over_budget": float(np.mean([not o.is_within_budget for o in budgeted]))} if budgeted else {}),
    }


def _comparison(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    rewards = [training_reward(t.outcome) for t in trajectories if t.outcome is not None]
    groups = by_group(trajectories).values()
    return {
        "training_reward": float(np.mean(rewards)),
        "even_groups": float(np.mean([len(set(group)) == 1 for group in groups])),
    }
