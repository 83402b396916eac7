"""Laws of recovery, intervals, and tables over seeds."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mopd import cli
from megatron_mopd.errors import UserError
from megatron_mopd.telemetry.cell_scores import CellScores, Measured, scores_summary, wilson
from megatron_mopd.telemetry.eval_table import eval_table, parse_groups, statistic
from megatron_mopd.telemetry.recovery import Compared, Score, average, domain_recoveries, recoveries
from megatron_mopd.telemetry.summary import write_summary

BENCHMARKS = [(0, 1), (2, 3), (4,)]
"""Mathematics (AIME25, AIME26), instructions (IFBench, IFEval), software (SWE-V)."""
SFT = (45.42, 54.48, 42.69, 84.17, 35.80)
TEACHERS = (54.79, 63.65, 78.40, 95.50, 51.20)
PUBLISHED = {  # arXiv 2606.30406: scores, mean, and the three domains as printed
    "Mix-RL": ((52.71, 63.75, 75.00, 94.58, 48.80), 0.8818, (0.893, 0.908, 0.844)),
    "Cascade RL": ((48.54, 61.88, 77.11, 95.80, 47.80), 0.7752, (0.567, 0.979, 0.779)),
    "Off-policy finetune": ((51.56, 63.44, 80.95, 93.35, 45.80), 0.8241, (0.814, 1.009, 0.649)),
    "Parameter average": ((47.81, 59.58, 53.74, 88.79, 39.60), 0.3280, (0.404, 0.333, 0.247)),
    "Task arithmetic": ((49.38, 63.96, 78.23, 95.81, 48.80), 0.8574, (0.725, 1.003, 0.844)),
    "MOPD": ((51.46, 65.31, 77.89, 93.84, 50.40), 0.9373, (0.910, 0.954, 0.948)),
}


def compared(sft: float, teacher: float, student: float, stderr: float = 0.0) -> Compared:
    return Compared(Score(sft, stderr), Score(teacher, stderr), Score(student, stderr))


def policy(score: float, tokens: float = 3.0, prompts: int = 400) -> Measured:
    return Measured(score, min(1.0, score + 0.1), tokens, 1.5, prompts)


def cell(domain: str, effort: str, sft: float, teacher: float, student: float, tokens: float = 3.0) -> CellScores:
    return CellScores(domain, effort, policy(sft), policy(teacher), policy(student, tokens))


@pytest.mark.parametrize("method", PUBLISHED)
def test_the_published_table_comes_out_to_four_digits(method: str) -> None:
    """By the function that fills `domain_recovery_raw` of summary.json."""
    scores, mean, by_domain = PUBLISHED[method]
    domains = [[compared(SFT[i], TEACHERS[i], scores[i]) for i in of_domain] for of_domain in BENCHMARKS]
    found = domain_recoveries(domains)
    assert found.mean is not None
    assert f"{found.mean.value:.4f}" == f"{mean:.4f}"
    assert found.worst == pytest.approx(min(by_domain), abs=6e-4)
    for benchmarks, printed in zip(domains, by_domain, strict=True):
        (alone,) = [domain_recoveries([benchmarks]).mean]
        assert alone is not None
        assert alone.value == pytest.approx(printed, abs=6e-4)


def test_a_mean_of_the_ratios_of_benchmarks_is_another_number() -> None:
    scores, mean, _ = PUBLISHED["MOPD"]
    ratios = recoveries([compared(*three) for three in zip(SFT, TEACHERS, scores, strict=True)]).mean
    assert ratios is not None
    assert f"{ratios.value:.3f}" == "0.923"
    assert abs(ratios.value - mean) > 0.01


@given(st.lists(st.tuples(*[st.floats(0, 1)] * 3), min_size=1, max_size=9), st.floats(0.1, 100), st.floats(-50, 50))
def test_recovery_knows_no_unit(scores: list[tuple[float, float, float]], scale: float, shift: float) -> None:
    """Shares or per cent: an affine map of all scores changes no recovery."""
    plain, mapped = (
        recoveries([compared(*(a * x + b for x in three), stderr=a * 0.01) for three in scores])
        for a, b in ((1.0, 0.0), (scale, shift))
    )
    if plain.without_gap == mapped.without_gap and plain.mean and mapped.mean:
        assert mapped.mean.value == pytest.approx(plain.mean.value, rel=1e-6, abs=1e-6)
        assert mapped.mean.stderr == pytest.approx(plain.mean.stderr, rel=1e-6)


def test_the_sft_policy_recovers_nothing_and_the_teacher_all() -> None:
    for at, want in ((0.2, 0.0), (0.6, 1.0), (0.7, 1.25)):
        assert recoveries([compared(0.2, 0.6, at)]).mean == pytest.approx((want, 0.0))


def test_standard_error_equals_hand_computed_numbers() -> None:
    one = CellScores("general", "low", policy(0.2, prompts=100), policy(0.6, prompts=100), policy(0.5, prompts=100))
    # variances of the means: .25/100, .24/100, .16/100; gap .4; (.0025 + .5625 * .0024 + .0625 * .0016) / .16
    assert one.compared.recovery == pytest.approx((0.75, math.sqrt(0.00395 / 0.16)))
    assert average([Score(1.0, 0.3), Score(2.0, 0.4)]) == pytest.approx((1.5, 0.25))


def test_a_gap_within_two_standard_errors_is_suppressed_and_counted() -> None:
    just, not_quite = compared(0.40, 0.44, 0.9, stderr=0.01), compared(0.40, 0.42, 0.9, stderr=0.01)
    assert just.recovery is not None  # .04 > 2 * sqrt(2) * .01
    assert not_quite.recovery is None
    found = recoveries([just, not_quite, compared(0.5, 0.4, 0.9)])
    assert (found.without_gap, found.worst) == (2, pytest.approx(12.5))
    assert recoveries([not_quite]) == (None, None, None, 1)


def test_means_cap_each_part_before_averaging() -> None:
    found = recoveries([compared(0.0, 0.5, 0.8), compared(0.5, 1.0, 0.6)])
    assert found.mean is not None
    assert (found.mean.value, found.mean_capped, found.worst) == pytest.approx((0.9, 0.6, 0.2))


@given(st.integers(1, 2000), st.data())
def test_wilson_holds_the_share_and_narrows(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, n))
    low, high = wilson(k / n, n)
    assert 0.0 <= low <= k / n + 1e-12
    assert k / n - 1e-12 <= high <= 1.0
    assert wilson(k / n, 4 * n)[1] - wilson(k / n, 4 * n)[0] < high - low
    z2 = 1.959964**2
    for edge in (low, high):  # the score test's own equation
        if 0.0 < edge < 1.0:
            assert (k / n - edge) ** 2 == pytest.approx(z2 * edge * (1 - edge) / n, rel=1e-6, abs=1e-12)


def test_a_summary_averages_within_a_domain_first_and_compares_with_oracle_routing() -> None:
    cells = [
        cell("a", "low", 0.1, 0.3, 0.3, 2.0),
        cell("a", "max", 0.1, 0.7, 0.4, 9.0),
        cell("b", "low", 0.5, 0.9, 0.9),
    ]
    summary = scores_summary(cells)
    assert summary["mean_recovery_raw"] == pytest.approx((1 + 0.5 + 1) / 3)
    assert [d["recovery"] for d in summary["domains"]] == pytest.approx([0.25 / 0.4, 1.0])
    assert summary["domain_recovery_raw"] == pytest.approx((0.625 + 1) / 2)
    assert (summary["worst_recovery"], summary["worst_domain_recovery"]) == pytest.approx((0.5, 0.625))
    assert summary["oracle"]["gap"] == pytest.approx(-0.3 / 3)
    assert summary["effort_order_kept"] is True
    assert summary["cells"][0]["interval"]["student"] == list(wilson(0.3, 400))
    assert summary["cells"][0]["tool_calls"] == {"sft": 1.5, "teacher": 1.5, "student": 1.5}
    assert scores_summary([*cells[:2], cell("a", "top", 0.1, 0.9, 0.5, 9.0)])["effort_order_kept"] is False


def test_scores_reject_a_number_that_is_no_share() -> None:
    with pytest.raises(ValueError, match=r"score 1\.2 is not in \[0, 1\]"):
        policy(1.2)


def test_a_table_has_means_and_standard_errors_over_seeds() -> None:
    seeds = [scores_summary([cell("a", "low", 0.2, 0.6, student)]) for student in (0.4, 0.5, 0.6)]
    (method,) = eval_table({"m": seeds})["methods"]
    assert method["mean_recovery"] == pytest.approx({"mean": 0.75, "stderr": 0.25 / math.sqrt(3), "seeds": 3})
    assert method["cells"][0]["student"]["mean"] == pytest.approx(0.5)
    assert method["gap"]["mean"] == pytest.approx(-0.1)
    assert statistic([0.5, None]) == {"mean": 0.5, "stderr": None, "seeds": 1}
    assert statistic([None]) == {"mean": None, "stderr": None, "seeds": 0}


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    folders = []
    for seed, student in enumerate((0.4, 0.5, 0.6)):
        folders.append(tmp_path / f"s{seed}")
        folders[-1].mkdir()
        write_summary(folders[-1], [cell("a", "low", 0.2, 0.6, student)], [], wall_s=1.0, layout={})
    return [str(folder) for folder in folders]


def test_eval_table_prints_and_writes_what_it_measured(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        cli.main(["eval-table", *runs, "--out", str(tmp_path / "new" / "table.md")])
    assert "0.750 ± 0.144" in capsys.readouterr().out
    markdown = (tmp_path / "new" / "table.md").read_text()
    assert "| student | 0.750 ± 0.144 | 0.750 ± 0.144 |" in markdown
    assert "| a | 0.200 ± 0.000 → 0.500 ± 0.058 / 0.600 ± 0.000; 0.750 ± 0.144; 3.0 ± 0.0 tokens |" in markdown
    with pytest.raises(SystemExit) as ended:
        cli.main(["eval-table", f"x={','.join(runs[:2])}", f"y={runs[2]}", "--out", str(tmp_path / "table.json")])
    assert ended.value.code == 0
    x, y = json.loads((tmp_path / "table.json").read_text())["methods"]
    assert (x["worst_recovery"]["seeds"], y["worst_recovery"]["stderr"]) == (2, None)


@pytest.mark.parametrize("words", [[], ["a", "b=c"], ["a=", "b=c"], ["a=x", "a=y"], ["a", "--out", "x.csv"], ["-x"]])
def test_eval_table_refuses_what_it_does_not_understand(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["eval-table", *words])
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_eval_table_refuses_a_run_that_was_not_evaluated_or_otherwise(runs: list[str], tmp_path: Path) -> None:
    assert parse_groups(["runs/x=1", "runs/y"]) == {"student": [Path("runs/x=1"), Path("runs/y")]}
    (tmp_path / "empty").mkdir()
    write_summary(tmp_path / "empty", [cell("b", "low", 0.2, 0.6, 0.4)], [], wall_s=1.0, layout={})
    from megatron_mopd.telemetry.eval_table import run_command

    for words in ([runs[0], str(tmp_path / "empty")], [f"x={runs[0]}", f"y={tmp_path / 'empty'}"]):
        with pytest.raises(UserError, match=r"s0 and .*empty were evaluated on different cells"):
            run_command(words)
    with pytest.raises(UserError, match=r"s0 is named twice; name each seed of a method once"):
        run_command([f"x={runs[0]},{runs[1]},{runs[0]}/../s0"])
    (tmp_path / "empty" / "summary.json").unlink()
    with pytest.raises(UserError, match="run mopd eval with run"):
        run_command([str(tmp_path / "empty")])
