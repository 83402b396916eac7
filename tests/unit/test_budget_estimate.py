"""The estimators of b0(x): equal to a reference, with a fallback that is counted."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import numpy as np
import pytest

from megatron_mopd.budgets import _lines, estimate, output_files, summarize, summary_lines
from megatron_mopd.config import BudgetEstimate, Config
from megatron_mopd.errors import UserError
from megatron_mopd.prompts.files import read_prompts
from megatron_mopd.types import Outcome, Prompt


def prompt(name: str, domain: str = "law") -> Prompt:
    return Prompt(name, domain, "", "qa", ())


def outcomes(*rewards_and_tokens: tuple[float, int]) -> list[Outcome]:
    return [Outcome(reward, spent) for reward, spent in rewards_and_tokens]


EASY = outcomes((1.0, 4), (1.0, 6), (0.0, 90), (1.0, 5), (0.5, 20))
HARD = outcomes((0.0, 30), (0.0, 40))
GUESSED = outcomes((1.0, 0), (1.0, 0))


def test_the_median_of_correct_ones_and_the_fallback_of_the_domain() -> None:
    prompts = [prompt("easy"), prompt("hard"), prompt("guessed"), prompt("tax", "tax")]
    found = {"easy": EASY, "hard": HARD, "guessed": GUESSED, "tax": outcomes((1.0, 7))}
    got = estimate(prompts, found, BudgetEstimate())
    assert got["easy"].budget_tokens == statistics.median([4, 6, 5, 20])
    assert got["guessed"].budget_tokens == 1.0, "never less than a token"
    assert got["hard"].budget_tokens == pytest.approx(1 + 0.9 * (5.5 - 1)), "0.9 of the way between the two known ones"
    assert [got[p.id].is_fallback for p in prompts] == [False, True, False, False]
    assert (got["easy"].samples, got["easy"].correct, got["hard"].correct) == (5, 4, 0)
    summary = summarize(prompts, got)
    assert (summary["law"]["prompts"], summary["law"]["fallbacks"], summary["tax"]["fallbacks"]) == (3, 1, 0)
    assert summary["law"]["correct"] == pytest.approx(6 / 9)
    assert "1 prompts without a correct one" in summary_lines(summary)[0]
    assert "without" not in summary_lines(summary)[1]


@pytest.mark.parametrize("quantile", [0.25, 0.5, 1.0])
def test_a_quantile_is_over_all_samples(quantile: float) -> None:
    got = estimate(
        [prompt("easy"), prompt("hard")],
        {"easy": EASY, "hard": HARD},
        BudgetEstimate(estimator="quantile", quantile=quantile),
    )
    assert got["easy"].budget_tokens == np.quantile([4, 6, 90, 5, 20], quantile)
    assert not got["hard"].is_fallback


def test_a_domain_without_a_correct_sample_is_refused() -> None:
    with pytest.raises(UserError, match="not one sample of law was correct"):
        estimate([prompt("hard")], {"hard": HARD}, BudgetEstimate())


@pytest.mark.parametrize("text", ["a\u2028b", "a\x85b"])
def test_lines_are_those_that_read_prompts_finds(text: str, tmp_path: Path) -> None:
    """JSON need not escape what Unicode takes for the end of a line."""
    row = {"id": "a", "domain": "law", "environment": "qa", "messages": [{"role": "user", "content": text}]}
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(row, ensure_ascii=False).encode() + b"\r\n\n")
    (prompt,) = read_prompts([file])
    assert [row["messages"][0] for row in _lines(file)] == list(prompt.messages)


@pytest.mark.parametrize(
    ("files", "eval_files", "reason"),
    [
        (["a/x.jsonl"], ["b/x.jsonl"], "two of prompts.files and prompts.eval_files would be"),
        (["run/prompts/x.jsonl"], [], "is what this run would write"),
    ],
)
def test_files_that_would_be_overwritten_are_refused(files: list[str], eval_files: list[str], reason: str) -> None:
    config = Config.model_validate(
        {
            "run": {"folder": "run", "num_steps": 1},
            "student": {"checkpoint": "unused"},
            "prompts": {"files": files, "eval_files": eval_files, "batch_size": 1, "mixture": {"law": 1}},
            "rollout": {"max_response_tokens": 8},
        }
    )
    with pytest.raises(UserError, match=reason):
        output_files(config)
    fine = config.model_copy(update={"run": config.run.model_copy(update={"folder": Path("other")})})
    if not eval_files:
        assert output_files(fine) == {Path("run/prompts/x.jsonl"): Path("other/prompts/x.jsonl")}
