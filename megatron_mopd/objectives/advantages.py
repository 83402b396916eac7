"""Advantages of outcomes: how much better a trajectory did than the others of its prompt.

    r = the verifier's reward, and -1 once the trajectory has spent more than its budget tau * b0(x)
    A = (r - max(mean of the group, baseline_floor)) / max(standard deviation of the group, min_std)

The budget rule is that of Kimi K3 (arXiv 2607.24653, section 4.1.3), the group's mean and deviation are those of GRPO
(arXiv 2402.03300, with the deviation over K and not K - 1), `std: none` is arXiv 2503.20783. Under a floor a group that
does worse than it learns what not to do, and not what was least bad.

The advantage is a number of the whole trajectory: each of its tokens has it. Promises (tests/unit/test_advantages.py):
equal to a float64 reference; no order of trajectories changes a bit of it. Torch-free.

Shape suffix: n trajectories.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megatron_mopd import config
from megatron_mopd.types import Outcome, Trajectory

OVER_BUDGET = -1.0


def training_reward(outcome: Outcome) -> float:
    return outcome.reward if outcome.is_within_budget else OVER_BUDGET


def outcome_advantages(trajectories: Sequence[Trajectory], options: config.Advantage) -> np.ndarray:
    """[n] float32. The trajectories are whole groups, in any order."""
    groups = by_group(trajectories)
    statistics = {group: _statistics(rewards) for group, rewards in groups.items()}
    advantages_n = np.zeros(len(trajectories), np.float32)
    for i, t in enumerate(trajectories):
        mean, deviation = statistics[t.group]
        baseline = mean if options.baseline_floor is None else max(mean, options.baseline_floor)
        divisor = max(deviation, options.min_std) if options.std == "group" else 1.0
        advantages_n[i] = (_reward(t) - baseline) / divisor
    return advantages_n


def by_group(trajectories: Sequence[Trajectory]) -> dict[int, list[float]]:
    """The rewards of each group."""
    groups: dict[int, list[float]] = {}
    for t in trajectories:
        groups.setdefault(t.group, []).append(_reward(t))
    return groups


def _reward(trajectory: Trajectory) -> float:
    assert trajectory.outcome is not None, "the sampler attaches the environment's outcome"
    return training_reward(trajectory.outcome)


def _statistics(rewards: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation; fsum, because it knows no order. Equal rewards are their mean to the bit, and three
    times 0.1, divided by 3, is another float."""
    if len(set(rewards)) == 1:
        return rewards[0], 0.0
    mean = math.fsum(rewards) / len(rewards)
    return mean, math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards))
