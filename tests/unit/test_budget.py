"""Laws of budgets: tau * b0(x), tau of the cell, where it starts and how it gets there."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from megatron_mopd.config import Budgets, Config
from megatron_mopd.errors import UserError
from megatron_mopd.preflight import check_budgets
from megatron_mopd.rollout.budget import budget_tokens, final_taus, taus_at
from megatron_mopd.types import Cell, Outcome, Prompt

TAU = {"low": 0.34, "max": 1.5}


def config(num_steps: int = 10, **budgets: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"folder": "unused", "num_steps": num_steps},
            "student": {"checkpoint": "unused"},
            "prompts": {"batch_size": 4, "mixture": {"law": 1, "tax": 1}, "efforts": {"low": 1, "max": 1}},
            "rollout": {"max_response_tokens": 8},
            "budgets": budgets,
        }
    )


def prompt(domain: str = "law", effort: str = "low", b0: float | None = 12.0) -> Prompt:
    return Prompt("p", domain, effort, "qa", (), budget_tokens=b0)


def test_tau_is_of_the_effort_or_of_domain_and_effort() -> None:
    assert final_taus(config(tau=TAU)) == {Cell(d, e): tau for d in ("law", "tax") for e, tau in TAU.items()}
    by_domain = config(tau={"law": TAU, "tax": {"low": 1}})
    assert final_taus(by_domain) == {Cell("law", "low"): 0.34, Cell("law", "max"): 1.5, Cell("tax", "low"): 1.0}


def test_a_budget_is_tau_times_b0_and_absent_without_either() -> None:
    taus = final_taus(config(tau=TAU))
    assert budget_tokens(prompt(), taus) == pytest.approx(0.34 * 12.0, rel=1e-12)
    assert budget_tokens(prompt(b0=None), taus) is None
    assert budget_tokens(prompt(domain="code"), taus) is None
    assert final_taus(config()) == {}


def test_tau_goes_linearly_from_start_to_its_own_and_stays() -> None:
    """Float64 reference: the line through (0, start) and (fraction * steps, tau), then flat."""
    annealed = config(num_steps=20, tau=TAU, start=3.0, anneal_fraction=0.4)
    for effort, tau in TAU.items():
        got = [taus_at(annealed, step)[Cell("law", effort)] for step in range(20)]
        np.testing.assert_allclose(got, np.interp(np.arange(20), [0, 8], [3.0, tau]), rtol=1e-14)
        assert got[8:] == [tau] * 12
    assert taus_at(config(tau=TAU), 0) == final_taus(config(tau=TAU)), "without a start tau is its own at once"


def test_no_budget_loses_a_token_to_a_float_product() -> None:
    """0.29 * 100 is below 29. Exact rationals are the reference."""
    for hundredths in range(1, 200):
        taus = {Cell("law", "low"): hundredths / 100}
        for b0 in (1, 7, 60, 100, 12345):
            budget = budget_tokens(prompt(b0=float(b0)), taus)
            assert budget is not None
            most = Fraction(hundredths, 100) * b0
            assert Outcome(1.0, math.floor(most), budget).is_within_budget
            assert not Outcome(1.0, math.floor(most) + 1, budget).is_within_budget


def test_an_annealed_budget_keeps_its_last_token() -> None:
    """0.2 + (0.05 - 0.2) is below 0.05, and 20 times that below 1."""
    taus = taus_at(config(tau={"low": 0.05, "max": 0.05}, start=0.2), 9)
    assert Outcome(1.0, 1, budget_tokens(prompt(b0=20.0), taus)).is_within_budget


@pytest.mark.parametrize("tau", [{"low": 0}, {"law": {"low": -1.0}}, {"low": "x"}, {"low": True}])
def test_a_tau_that_is_not_above_zero_is_refused(tau: Any) -> None:
    with pytest.raises(ValueError, match="tau of low must be a number above 0, not"):
        Budgets(tau=tau)
    with pytest.raises(ValueError, match="not both in one"):
        Budgets(tau={"low": 1.0, "law": {"low": 1.0}})


def test_a_student_that_reads_no_effort_has_one_budget_a_prompt() -> None:
    blind = config(tau=TAU)
    one = blind.prompts.model_copy(update={"effort_variable": None})
    with pytest.raises(UserError, match="a prompt would have the budgets of low, max"):
        check_budgets(blind.model_copy(update={"prompts": one}), [prompt()])
    same = config(tau={"low": 1.0, "max": 1.0})
    check_budgets(same.model_copy(update={"prompts": one}), [prompt()])
    check_budgets(blind.model_copy(update={"prompts": one.model_copy(update={"efforts": {"low": 1.0}})}), [prompt()])


@pytest.mark.parametrize(
    ("budgets", "b0", "reason"),
    [
        ({"start": 1.5}, 12.0, "budgets.start=1.5 leads nowhere; set budgets.tau"),
        ({"tau": {"low": 1.0}}, 12.0, "budgets.tau has nothing for law/max, tax/max"),
        ({"tau": TAU, "start": 1.0}, 12.0, "budgets.start=1 is below budgets.tau of law/max, 1.5"),
        ({"tau": TAU}, None, "budgets.tau is set, and prompt p has no budget_tokens"),
    ],
)
def test_budgets_that_hold_nobody_are_refused(budgets: dict[str, Any], b0: float | None, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        check_budgets(config(**budgets), [prompt(b0=b0)])


def test_annealing_wants_b0_of_every_prompt_and_a_budget_does_not() -> None:
    mixed = [prompt(), prompt(b0=None)]
    check_budgets(config(tau=TAU), mixed)
    with pytest.raises(UserError, match=r"budgets\.start is set, and prompt p has no budget_tokens"):
        check_budgets(config(tau=TAU, start=2.0), mixed)
