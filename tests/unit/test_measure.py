"""What the driver says of a step: budgets of those that have one, groups of objectives that compare them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_mopd.config import Config
from megatron_mopd.rollout.measure import rollout_metrics
from megatron_mopd.types import Graded, Outcome, Prompt, RenderedPrompt, Segment, Trajectory


def config(**tables: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"folder": "unused", "num_steps": 10},
            "student": {"checkpoint": "unused"},
            "prompts": {"batch_size": 2, "mixture": {"law": 1, "tax": 1}, "efforts": {"low": 1}},
            "rollout": {"max_response_tokens": 8},
            **tables,
        }
    )


def graded(domain: str, group: int, outcome: Outcome, version: int = 3) -> Graded:
    prompt = RenderedPrompt(Prompt("p", domain, "low", "qa", ()), (1,), (1,))
    segment = Segment((5, 6), (-0.5, -0.5), (True, True), version)
    return Graded(Trajectory("t", prompt, (segment,), "stop", outcome, group), "", np.zeros(2, np.float32))


SOME = [
    graded("law", 0, Outcome(1.0, 4, 5.0)),
    graded("law", 0, Outcome(1.0, 6, 5.0)),
    graded("law", 1, Outcome(0.0, 1, 5.0), version=2),
    graded("law", 1, Outcome(0.0, 2, 5.0)),
    graded("tax", 2, Outcome(1.0, 9)),
]


def test_outcomes_are_measured_where_they_are_compared_and_budgets_where_there_are_any() -> None:
    grpo = config(objective={"name": "grpo"}, budgets={"tau": {"law": {"low": 0.5}}, "start": 1.5})
    got = rollout_metrics(SOME, grpo, step=3, weight_version=3, seconds={"load": 1.0})
    law, tax = got["cells"]["law/low"], got["cells"]["tax/low"]
    assert (law["reward"], law["reward_within_budget"], law["over_budget"]) == (0.5, 0.25, 0.25)
    assert law["training_reward"] == (1.0 - 1.0 + 0.0 + 0.0) / 4
    assert law["even_groups"] == 0.5
    assert law["tau"] == pytest.approx(1.0), "half of the way, after half of the steps in which tau moves"
    assert not {"over_budget", "tau"} & tax.keys()
    assert (tax["training_reward"], tax["even_groups"]) == (1.0, 1.0)
    assert got["staleness"] == pytest.approx(0.2)


def test_a_run_that_compares_nothing_has_no_groups() -> None:
    law = rollout_metrics(SOME, config(), step=0, weight_version=3, seconds={})["cells"]["law/low"]
    assert not {"training_reward", "even_groups"} & law.keys()


def test_ages_are_those_of_sampled_tokens() -> None:
    prompt = RenderedPrompt(Prompt("p", "law", "low", "qa", ()), (1,), (1,))
    segments = (
        Segment((5, 6), (-0.5, -0.5), (True, True), 1, "abort"),
        Segment((7,), (-0.5,), (True,), 3, "stop", kv_version=1),
        Segment.observation((8, 9), 3),
        Segment((7,), (-0.5,), (True,), 4),
    )
    old = Graded(Trajectory("t", prompt, segments, "stop", Outcome(1.0, 4)), "", np.zeros(6, np.float32))
    got = rollout_metrics([old, graded("law", 1, Outcome(0.0, 1), version=4)], config(), 4, 4, {})
    assert got["stale_share"] == pytest.approx(3 / 6)
    assert got["stale_kv_share"] == pytest.approx(1 / 6)
    assert got["staleness"] == pytest.approx((3 + 3 + 1) / 6)
    assert (got["oldest"], got["version_span"]) == (3, 3)
