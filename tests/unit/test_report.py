"""Laws of summary.json and report.html, on a run folder that the test records itself."""

from __future__ import annotations

import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from megatron_mopd.errors import UserError
from megatron_mopd.step_metrics import NOTHING, CellMetrics, Mean, StepMetrics
from megatron_mopd.telemetry.cell_scores import CellScores, Measured
from megatron_mopd.telemetry.record import Record, read_record
from megatron_mopd.telemetry.report import SECTIONS, write_report
from megatron_mopd.telemetry.row import step_row
from megatron_mopd.telemetry.summary import print_summary, write_summary
from megatron_mopd.telemetry.svg import MAX_POINTS, Series, line_chart
from megatron_mopd.types import Cell

DOMAINS, EFFORTS = ("general", "agents", "coding"), ("low", "high", "max")
CELLS = [Cell(d, e) for d in DOMAINS for e in EFFORTS]
ISSUE_KEYS = {
    "cells",
    "mean_recovery",
    "mean_recovery_raw",
    "worst_recovery",
    "reverse_kl_first",
    "reverse_kl_last",
    "wall_s",
    "layout",
}
SCORES = {  # sft, teacher, student: seed 0 of the miniature
    "general": [(0.31, 0.43, 0.46), (0.42, 0.71, 0.69), (0.47, 0.73, 0.70)],
    "agents": [(0.29, 0.36, 0.48), (0.41, 0.72, 0.74), (0.51, 0.97, 0.99)],
    "coding": [(0.18, 0.45, 0.44), (0.33, 0.69, 0.57), (0.38, 0.71, 0.60)],
}


def learner_metrics(step: int, steps: int = 60) -> StepMetrics:
    fade = math.exp(-4 * step / steps)
    cells = {
        cell: CellMetrics(
            96,
            500 + 90 * i,
            0.1 + fade * (0.4 + 0.05 * i),
            0.03 * fade,
            0.5 + 0.1 * i,
            Mean(1e-7, 500 + 90 * i),
            4e-6,
            0,
            reverse_kl_deciles=(Mean(-0.01, 50), *(Mean(fade * j / 9, 50) for j in range(1, 9)), NOTHING),
            logit_grad_norm=0.1 + 0.02 * i,
        )
        for i, cell in enumerate(CELLS)
    }
    return StepMetrics(step, -0.3 * fade, 0.8 + fade, 4e-3 * min(1, step / 3), 21000, 2, cells)


def rollout_metrics(step: int, steps: int = 60) -> dict:
    rise = 1 - math.exp(-3 * step / steps)
    cells = {
        str(cell): {
            "trajectories": 96,
            "reward": 0.4 + 0.5 * rise,
            "reward_within_budget": SCORES[cell.domain][i % 3][0] * (1 - rise) + SCORES[cell.domain][i % 3][2] * rise,
            "spent_tokens": 3.0 + 2 * (i % 3) * rise,
            "response_tokens": 6.0 + 3 * (i % 3),
            "truncated_fraction": 0.01,
        }
        for i, cell in enumerate(CELLS)
    }
    return {
        "cells": cells,
        "staleness": 0.0,
        "unscored": 0,
        "seconds": {"load": 0.02, "sample": 0.9 + 0.2 * (step % 3), "score": 0.2},
    }


def record_run(folder: Path, steps: int = 60) -> Path:
    """A run folder with a configuration and `steps` rows, not yet evaluated."""
    folder.mkdir(parents=True)
    record = Record(folder, next_step=1)
    for step in range(1, steps + 1):
        seconds = {"wait": 1.3, "update": 0.6, "sync": 0.1, "step": 2.3}
        record.append(step, step_row(learner_metrics(step), rollout_metrics(step), seconds))
    record.close()
    config = {
        "run": {"folder": str(folder), "seed": 0},
        "prompts": {"mixture": dict.fromkeys(DOMAINS, 1), "efforts": dict.fromkeys(EFFORTS, 1), "batch_size": 864},
        "sglang": {"api_key": "planted-key-in-the-config", "mem_fraction": 0.8},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    return folder


def cell_scores() -> list[CellScores]:
    return [
        CellScores(c.domain, c.effort, *(Measured(s, s, 3.0 + 2 * (i % 3), 0.0, 512) for s in SCORES[c.domain][i % 3]))
        for i, c in enumerate(CELLS)
    ]


def summarise(folder: Path, wall_s: float = 93.5, layout: dict | None = None) -> dict:
    return write_summary(folder, cell_scores(), read_record(folder), wall_s, layout or {})


class Page(HTMLParser):
    """Checks that tags nest, and collects what the page draws and refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.series: dict[str, str] = {}
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.add(tag)
        attributes = dict(attrs)
        if "data-series" in attributes:
            self.series[attributes["data-series"]] = attributes["d"]
        self.links += [v for k, v in attrs if k in ("src", "href", "action")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_summary_has_the_keys_of_the_interface_and_is_strict_json(tmp_path: Path) -> None:
    folder = record_run(tmp_path / "run")
    written = summarise(folder, layout={"tensor": 2, "expert": 2, "processes": 2})
    summary = json.loads((folder / "summary.json").read_text(), parse_constant=lambda c: pytest.fail(f"{c} in JSON"))
    assert summary == written
    assert summary.keys() >= ISSUE_KEYS
    assert all(
        c.keys() >= {"domain", "effort", "sft", "teacher", "student", "recovery", "tokens"} for c in summary["cells"]
    )
    assert summary["reverse_kl_first"] == learner_metrics(1).mean("reverse_kl")
    assert summary["reverse_kl_last"] == learner_metrics(60).mean("reverse_kl")
    assert summary["cells"][0]["recovery"] == pytest.approx(0.15 / 0.12)


def test_printed_table_shows_every_cell_in_80_columns(tmp_path: Path) -> None:
    summary = summarise(record_run(tmp_path / "run"))
    out = io.StringIO()
    print_summary(summary, Console(file=out, width=80))
    text = out.getvalue()
    for cell in summary["cells"]:
        assert f"{cell['sft']:.2f} → {cell['student']:.2f} | {cell['teacher']:.2f}" in text
        assert f"{100 * cell['recovery']:.0f} ± " in text
    assert "worst 67 %" in text


def test_report_draws_every_series_and_needs_nothing_beside_it(tmp_path: Path) -> None:
    folder = record_run(tmp_path / "run")
    summarise(folder, layout={"tensor": 2, "expert": 2})
    text = write_report(folder).read_text()
    page = Page(text)
    wanted = {f"cell/{c.domain}/{c.effort}/{name}" for c in CELLS for _, name, _ in SECTIONS}
    wanted |= {run_key for _, _, run_key in SECTIONS} | {f"token_share/{d}" for d in DOMAINS}
    wanted |= {"train/loss", "train/grad_norm", "train/learning_rate", "train/mismatch_mean", "perf/tokens_per_s"}
    wanted |= {f"time/{part}_s" for part in ("load", "sample", "score", "update", "sync", "other")}
    assert page.series.keys() >= wanted
    assert all(path.count("L") >= 59 for path in page.series.values())
    assert not page.links
    assert "script" not in page.tags
    assert not re.search(r"https?:|url\(|@import", text)
    assert text.count('class="track"') == 9


def test_report_shows_the_balance_of_each_cell(tmp_path: Path) -> None:
    """The shares of the last steps; nine bars, where the last tenth has no token."""
    text = write_report(record_run(tmp_path / "run")).read_text()
    squares = [(0.1 + 0.02 * i) ** 2 for i in range(9)]
    charts = re.findall(r'<svg class="bars".*?</svg>', text)
    assert len(charts) == 9
    assert all(chart.count("<title>") == 9 and "<title>1: -0.01</title>" in chart for chart in charts)
    for i, cell in enumerate(CELLS):
        row = re.search(rf"<tr><th>{cell}</th>(.*?)<td><svg", text)
        assert row, cell
        want = [1 / 9, (500 + 90 * i) / sum(500 + 90 * j for j in range(9)), None, squares[i] / sum(squares)]
        shares = [float(x) / 100 for x in re.findall(r"<td>([\d.]+)%</td>", row[1])]
        assert [shares[0], shares[1], shares[3]] == pytest.approx([want[0], want[1], want[3]], abs=6e-4)
        assert "<td>1.00</td>" in row[1]


def test_report_has_every_number_of_the_evaluation(tmp_path: Path) -> None:
    folder = record_run(tmp_path / "run")
    summary = summarise(folder)
    text = write_report(folder).read_text()
    for cell in summary["cells"]:
        low, high = cell["interval"]["teacher"]
        assert f"<td>teacher</td><td>{cell['teacher']:.3f}</td><td>{low:.3f} to {high:.3f}</td>" in text
    for domain in summary["domains"]:
        assert f"<td>{domain['teacher']:.3f}</td><td>{100 * domain['recovery']:.0f} ± " in text
    assert f"{summary['oracle']['gap']:+.3f} ± " in text
    old = {k: v for k, v in summary.items() if k != "oracle"}
    (folder / "summary.json").write_text(json.dumps(old))
    assert "Student against teacher" in write_report(folder).read_text()


def test_report_keeps_secrets_of_the_configuration_out(tmp_path: Path) -> None:
    text = write_report(record_run(tmp_path / "run")).read_text()
    assert "planted-key-in-the-config" not in text
    assert "mem_fraction: 0.8" in text


def test_report_of_a_run_that_was_not_evaluated_has_curves_and_no_grid(tmp_path: Path) -> None:
    page = Page(write_report(record_run(tmp_path / "run", steps=1)).read_text())
    assert "train/reverse_kl" in page.series


def test_report_escapes_what_the_user_named(tmp_path: Path) -> None:
    folder = record_run(tmp_path / "a <b>&amp; run")
    file = folder / "metrics.jsonl"
    file.write_text(file.read_text().replace("cell/coding/", "cell/<u>coding/"))
    text = write_report(folder).read_text()
    assert "<b>&amp; run" not in text
    assert "<u>" not in text


def test_report_of_a_run_that_just_began_is_a_page(tmp_path: Path) -> None:
    assert Page(write_report(record_run(tmp_path / "run", steps=0)).read_text()).open == []


def test_report_rejects_a_folder_that_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no metrics\.jsonl; name the folder of a run"):
        write_report(tmp_path)


def test_chart_leaves_a_gap_where_nothing_was_measured_and_thins_long_runs() -> None:
    page = Page(line_chart([Series("m", "m", 0, [1, 2, 3, 4], [1.0, None, 2.0, 3.0])], "t"))
    assert page.series["m"].count("M") == 2
    long = Page(line_chart([Series("m", "m", 0, range(100_000), [1.0] * 100_000)], "t"))
    assert long.series["m"].count("L") < MAX_POINTS


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("summary.json", b'{"cells": ['),
        ("summary.json", b"[]"),
        ("summary.json", b'{"cells": []}'),
        ("config.yaml", b"a: ["),
        ("config.yaml", b"prompts: {}"),
        ("metrics.jsonl", b"\xff\n"),
        ("metrics.jsonl", b'{"step": 1, "metrics": {"train/loss": NaN}, "timing": {}}\n'),
        ("metrics.jsonl", b'{"step": 1, "metrics": {"train/loss": "x"}, "timing": {}}\n'),
        ("metrics.jsonl", b'{"step": "1", "metrics": {}, "timing": {}}\n'),
    ],
)
def test_a_file_that_is_something_else_is_refused_by_name(tmp_path: Path, name: str, content: bytes) -> None:
    folder = record_run(tmp_path / "run", steps=1)
    (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=re.escape(str(folder / name))):
        write_report(folder)
