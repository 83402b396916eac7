"""Laws of advantages: the budget rule, the group's baseline and deviation, in float64; no order matters."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest

from megatron_mopd.config import Advantage
from megatron_mopd.objectives.advantages import outcome_advantages, training_reward
from megatron_mopd.types import Outcome, Prompt, RenderedPrompt, Trajectory


def trajectories(outcomes: Sequence[Outcome], groups: Sequence[int]) -> list[Trajectory]:
    prompt = RenderedPrompt(Prompt("p", "law", "low", "qa", ()), (1,), (1,))
    return [
        Trajectory(f"{i}", prompt, (), "stop", outcome, group)
        for i, (outcome, group) in enumerate(zip(outcomes, groups, strict=True))
    ]


def draw(num_groups: int = 12, per_group: int = 8, seed: int = 0) -> list[Trajectory]:
    """Graded and binary rewards, with and without budgets, a group of equal ones; groups shuffled into each other."""
    rng = np.random.default_rng(seed)
    outcomes, groups = [], []
    for group in range(num_groups):
        for _ in range(per_group):
            reward = float(rng.random()) if group % 2 else float(rng.random() < 0.5)
            budget = None if group % 3 == 2 else float(rng.uniform(4, 8))
            outcomes.append(Outcome(1.0 if group == 5 else reward, int(rng.integers(0, 12)), budget))
            groups.append(group)
    order = rng.permutation(len(groups)).tolist()
    return trajectories([outcomes[i] for i in order], [groups[i] for i in order])


def reference(sampled: Sequence[Trajectory], options: Advantage) -> np.ndarray:
    """Written out in float64 with numpy, row by row."""
    rewards = []
    for t in sampled:
        assert t.outcome is not None
        o = t.outcome
        rewards.append(-1.0 if o.budget_tokens is not None and o.spent_tokens > o.budget_tokens else o.reward)
    rewards_n, group_n = np.array(rewards, np.float64), np.array([t.group for t in sampled])
    wanted = np.zeros(len(sampled), np.float64)
    for i in range(len(sampled)):
        peers = rewards_n[group_n == group_n[i]]
        baseline = peers.mean() if options.baseline_floor is None else max(peers.mean(), options.baseline_floor)
        divisor = max(peers.std(), options.min_std) if options.std == "group" else 1.0
        wanted[i] = (rewards_n[i] - baseline) / divisor
    return wanted


@pytest.mark.parametrize("floor", [None, 0.0, 0.6])
@pytest.mark.parametrize("std", ["group", "none"])
@pytest.mark.parametrize("min_std", [0.1, 0.4])
def test_advantages_equal_the_float64_reference(floor: float | None, std: str, min_std: float) -> None:
    sampled, options = draw(), Advantage.model_validate({"baseline_floor": floor, "std": std, "min_std": min_std})
    got = outcome_advantages(sampled, options)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, reference(sampled, options), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("spent", "budget", "reward"), [(4, 4.08, 1.0), (5, 4.08, -1.0), (4, 4.0, 1.0), (10**6, None, 1.0)]
)
def test_the_reward_is_minus_one_once_more_than_the_budget_is_spent(
    spent: int, budget: float | None, reward: float
) -> None:
    assert training_reward(Outcome(1.0, spent, budget)) == reward
    assert training_reward(Outcome(0.0, spent, budget)) == min(reward, 0.0)


def test_four_samples_by_hand() -> None:
    """Two right, one wrong, one over budget: rewards 1, 1, 0, -1 of mean 1/4 and variance 11/16."""
    outcomes = [Outcome(1.0, 1, 2.0), Outcome(1.0, 2, 2.0), Outcome(0.0, 2, 2.0), Outcome(1.0, 3, 2.0)]
    got = outcome_advantages(trajectories(outcomes, [7] * 4), Advantage())
    deviation = float(Fraction(11, 16)) ** 0.5
    np.testing.assert_allclose(got, np.array([0.75, 0.75, -0.25, -1.25]) / deviation, rtol=1e-6)
    bare = outcome_advantages(trajectories(outcomes, [7] * 4), Advantage(std="none"))
    np.testing.assert_array_equal(bare, [0.75, 0.75, -0.25, -1.25])


def test_a_group_of_equals_learns_nothing_unless_it_is_below_the_floor() -> None:
    worst = trajectories([Outcome(1.0, 9, 2.0)] * 4, [0] * 4)
    assert not outcome_advantages(worst, Advantage()).any()
    assert outcome_advantages(worst, Advantage(baseline_floor=0.0, min_std=0.4)).tolist() == [-2.5] * 4


@pytest.mark.parametrize("num_samples", [2, 3, 6, 7])
@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3])
def test_equal_rewards_have_no_advantage_to_the_bit(reward: float, num_samples: int) -> None:
    evenly = trajectories([Outcome(reward, 1)] * num_samples, [0] * num_samples)
    assert not outcome_advantages(evenly, Advantage(min_std=1e-9)).any()


def test_no_order_changes_a_bit() -> None:
    sampled = draw(seed=1)
    by_id = dict(zip((t.id for t in sampled), outcome_advantages(sampled, Advantage()).tolist(), strict=True))
    for seed in range(5):
        turned = [sampled[i] for i in np.random.default_rng(seed).permutation(len(sampled))]
        assert outcome_advantages(turned, Advantage()).tolist() == [by_id[t.id] for t in turned]


def test_groups_do_not_see_each_other() -> None:
    sampled = draw()
    alone = [t for t in sampled if t.group == 3]
    others = [dataclasses.replace(t, outcome=Outcome(5.0, 0)) if t.group != 3 else t for t in sampled]
    whole = outcome_advantages(others, Advantage())
    np.testing.assert_array_equal(
        [a for a, t in zip(whole, others, strict=True) if t.group == 3], outcome_advantages(alone, Advantage())
    )
