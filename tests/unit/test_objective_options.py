"""What makes no sense of an objective is refused in one line, before anything is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_mopd.config import Config, load_config
from megatron_mopd.errors import UserError
from megatron_mopd.objective_options import check_objective_options

TEACHER = {"name": "t", "domain": "law", "effort": "low", "checkpoint": "t"}
BASE: dict[str, Any] = {
    "run": {"folder": "unused", "num_steps": 1},
    "student": {"checkpoint": "unused"},
    "rollout": {"max_response_tokens": 8},
}
PROMPTS = {"batch_size": 1, "mixture": {"law": 1}, "efforts": {"low": 1}}
GRPO = {"objective": {"name": "grpo"}, "prompts": {**PROMPTS, "samples_per_prompt": 4}}
REFERENCE = {"objective": {"name": "grpo", "beta": 0.1}, "teachers": {"models": [TEACHER]}}
MOPD = {"objective": {"name": "mopd"}, "teachers": {"models": [TEACHER]}}
SFT = {"objective": {"name": "sft"}, "demonstrations": {"files": ["d.jsonl"]}}


def config(*parts: dict[str, Any]) -> Config:
    """Later tables over earlier ones, key by key."""
    tree: dict[str, Any] = {**BASE, "prompts": PROMPTS}
    for part in parts:
        for table, fields in part.items():
            tree[table] = {**tree.get(table, {}), **fields}
    return Config.model_validate(tree)


@pytest.mark.parametrize(
    "parts",
    [
        [MOPD],
        [MOPD, {"objective": {"ratio": {"mask_low": 0.5, "mask_high": 2.0}}}],
        [MOPD, {"objective": {"outcome_weight": 0.5, "advantage": {"std": "none"}}, "prompts": GRPO["prompts"]}],
        [GRPO],
        [GRPO, {"budgets": {"start": 2.0}, "objective": {"advantage": {"baseline_floor": 0.0}}}],
        [GRPO, REFERENCE],
        [SFT, {"demonstrations": {"neutral_fraction": 0.25}}],
    ],
)
def test_what_makes_sense_is_taken(parts: list[dict[str, Any]]) -> None:
    check_objective_options(config(*parts))


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        (
            [GRPO, {"prompts": {"samples_per_prompt": 1}}],
            "compares the rewards of a prompt's samples; set prompts.sampl",
        ),
        ([GRPO, {"teachers": {"max_lag_steps": 2}}], "with teachers.max_lag_steps=2 some could come in a later step"),
        ([GRPO, {"teachers": {"models": [TEACHER]}}], "objective.name=grpo without objective.beta does not use it"),
        ([GRPO, {"objective": {"outcome_weight": 1}}], "objective.outcome_weight is set, and objective.name=grpo"),
        ([GRPO, {"objective": {"domain_balance": "inverse_deviation"}}], "objective.domain_balance is set, and"),
        ([GRPO, {"objective": {"ratio": {"mask_low": 3, "mask_high": 2}}}], "mask_low=3 is not below mask_high=2"),
        (
            [GRPO, {"demonstrations": {"files": ["d"]}}],
            "demonstrations is set, and objective.name=grpo does not use it",
        ),
        (
            [MOPD, {"objective": {"outcome_weight": 1}}],
            "objective.name=mopd compares the rewards of a prompt's samples",
        ),
        (
            [MOPD, {"objective": {"beta": 1}}],
            "objective.beta is set, and objective.name=mopd does not use it; remove it",
        ),
        ([MOPD, {"objective": {"advantage": {"std": "none"}}}], "objective.advantage is set, and objective.name=mopd"),
        ([MOPD, {"budgets": {"start": 2.0}}], "budgets.start is set, and objective.name=mopd does not use it"),
        (
            [MOPD, {"objective": {"name": "topk", "ratio": {"mask_low": 1}}}],
            "objective.ratio is set, and objective.name",
        ),
        ([SFT, {"demonstrations": {"files": []}}], "name files in demonstrations.files"),
        ([SFT, {"teachers": {"models": [TEACHER]}}], "teachers.models is set, and objective.name=sft does not use it"),
        ([SFT, {"rollout": {"engine": "sglang"}}], "rollout.engine is set, and objective.name=sft does not use it"),
        (
            [SFT, {"demonstrations": {"neutral_fraction": 0.2}, "prompts": {"effort_variable": None}}],
            "demonstrations.neutral_fraction is of the prompts that name their effort",
        ),
    ],
)
def test_what_makes_no_sense_is_one_line(parts: list[dict[str, Any]], line: str) -> None:
    with pytest.raises(UserError) as caught:
        check_objective_options(config(*parts))
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tau_of_zero_is_one_line_with_its_key(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^budgets\.tau=.*: tau of low must be a number above 0, not 0$"):
        load_config(["examples/quickstart/mopd.yaml"], ["budgets.tau.low=0"])
