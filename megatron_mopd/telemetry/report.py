"""`report.html`: what a run did, on one page that needs no network, no script and no file beside it.

Promise: it is made from `metrics.jsonl`, `summary.json` and `config.yaml` of the run folder alone, at any time: a run
that has not been evaluated yet gets its curves, and no grid. Secrets in the configuration are replaced
(telemetry/redact.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from megatron_mopd.errors import UserError
from megatron_mopd.telemetry.curves import Curves
from megatron_mopd.telemetry.record import read_record, replace_file
from megatron_mopd.telemetry.redact import redact
from megatron_mopd.telemetry.registry import STEP_PARTS, cell_key, metric_of
from megatron_mopd.telemetry.report_balance import balance_section
from megatron_mopd.telemetry.report_scores import scores_section
from megatron_mopd.telemetry.report_style import STYLE
from megatron_mopd.telemetry.summary import percent, read_summary, recovery_level
from megatron_mopd.telemetry.svg import Series, colour_class, line_chart, stacked_chart, track, value_range
from megatron_mopd.types import Cell
from megatron_mopd.yaml_tree import read_yaml, write_yaml

SECTIONS = (
    ("Reverse KL", "reverse_kl", "train/reverse_kl"),
    ("Correct and within budget, in training", "reward_within_budget", "rollout/reward_within_budget"),
    ("Spent tokens", "spent_tokens", "rollout/spent_tokens"),
    ("Response length", "response_tokens", "rollout/response_tokens"),
    ("Entropy", "entropy", "train/entropy"),
    ("Clip fraction", "clip_fraction", "train/clip_fraction"),
)
"""Title, metric per cell, metric over all cells."""
OPTIMISATION = ("train/loss", "train/grad_norm", "train/learning_rate")
HEALTH = (
    "train/mismatch_mean",
    "train/mismatch_max",
    "train/mismatch_kl",
    "train/route_agreement",
    "rollout/truncated_fraction",
    "rollout/staleness",
    "perf/tokens_per_s",
)


_CELL_AXES = ("mixture", "efforts")  # the tables under prompts: that name domains and efforts


def write_report(run_folder: Path) -> Path:
    """Write RUN/report.html and return its path. UserError when the folder is not that of a run."""
    rows, summary, config = read_record(run_folder), read_summary(run_folder), _read_config(run_folder)
    curves = Curves(rows, config)
    parts = [
        f"<h1>{escape(run_folder.resolve().name)}</h1>",
        _tiles(curves, summary),
        _grid(summary, curves.efforts) if summary else "",
        scores_section(summary),
        *(_cell_section(curves, *section) for section in SECTIONS),
        _run_section(curves, "Optimisation", OPTIMISATION),
        _run_section(curves, "Health and speed", HEALTH),
        balance_section(curves),
        f'<div class="pair">{_time_section(curves)}{_token_share(curves)}</div>',
        _configuration(summary, config),
    ]
    page = (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(run_folder.resolve().name)} · megatron_mopd</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )
    replace_file(run_folder / "report.html", page)
    return run_folder / "report.html"


def _read_config(run_folder: Path) -> Mapping[str, Any] | None:
    file = run_folder / "config.yaml"
    config = read_yaml(file) if file.is_file() else {}
    prompts = config.get("prompts")
    if config and not (isinstance(prompts, dict) and all(isinstance(prompts.get(k), dict) for k in _CELL_AXES)):
        raise UserError(f"{file} is not the configuration of a run; remove it to report without")
    return config or None


def _tiles(curves: Curves, summary: Mapping[str, Any] | None) -> str:
    kl = [v for v in curves.values("train/reverse_kl") if v is not None]
    tiles = [("steps", str(len(curves.steps)), "")]
    if kl:
        tiles.append(("reverse KL", f"{kl[-1]:.3f}", f"from {kl[0]:.3f}"))
    if summary:
        raw = percent(summary["mean_recovery_raw"], summary["mean_recovery_raw_stderr"])
        tiles.append(("mean recovery", percent(summary["mean_recovery"]), f"raw {raw}"))
        tiles.append(("worst cell", percent(summary["worst_recovery"]), "recovery"))
        tiles.append(("wall time", f"{summary['wall_s']:.0f} s", ""))
    boxes = (
        f'<div class="tile"><span>{escape(n)}</span><b>{escape(v)}</b><i>{escape(x)}</i></div>' for n, v, x in tiles
    )
    return f'<div class="tiles">{"".join(boxes)}</div>'


def _grid(summary: Mapping[str, Any], efforts: Sequence[str]) -> str:
    by_cell = {Cell(c["domain"], c["effort"]): c for c in summary["cells"]}
    shown = [e for e in efforts if any(cell.effort == e for cell in by_cell)]
    head = "".join(f"<th>{escape(e)}</th>" for e in shown)
    rows = [
        f"<tr><th>{escape(domain)}</th>{''.join(_grid_cell(by_cell.get(Cell(domain, e))) for e in shown)}</tr>"
        for domain in dict.fromkeys(cell.domain for cell in by_cell)
    ]
    return (
        "<section><h2>Student against teacher</h2><p>Share of prompts answered correctly within the cell's budget, on "
        "a scale from 0 to 1: ○ SFT, ● student with its standard error, ❘ teacher. Below, the recovery of the "
        "teacher's gain over SFT and the mean tokens spent.</p>"
        f'<div class="scroll"><table class="grid"><tr><th></th>{head}</tr>{"".join(rows)}</table></div></section>'
    )


def _grid_cell(c: Mapping[str, Any] | None) -> str:
    if c is None:
        return "<td>-</td>"
    level = recovery_level(c["recovery"])
    return (
        f"<td>{track(c['sft'], c['student'], c['teacher'], c['stderr']['student'], level)}"
        f"<div>{c['sft']:.2f} → <b>{c['student']:.2f}</b> of {c['teacher']:.2f}</div>"
        f'<div><b class="{level}">{percent(c["recovery"], c["stderr"]["recovery"])}</b>'
        f" · {c['tokens']:.1f} tokens</div></td>"
    )


def _cell_section(curves: Curves, title: str, name: str, run_key: str) -> str:
    if run_key not in curves.keys:
        return ""
    by_domain = {
        domain: [
            curves.series(cell_key(cell, name), effort, i)
            for i, effort in enumerate(curves.efforts)
            if cell_key(cell := Cell(domain, effort), name) in curves.keys
        ]
        for domain in curves.domains
    }
    overall = curves.series(run_key, "all cells", 7)
    every = [overall, *(s for group in by_domain.values() for s in group)]
    shared = value_range([v for s in every for v in s.values if v is not None])
    charts = [_figure("all cells", line_chart([overall], title, shared))]
    charts += [
        _figure(escape(domain), line_chart(group, f"{title}, {domain}", shared)) for domain, group in by_domain.items()
    ]
    metric = metric_of(run_key)
    return _section(
        f"{title} <small>{escape(metric.unit)}</small>", metric.meaning, charts, list(enumerate(curves.efforts))
    )


def _token_share(curves: Curves) -> str:
    keys = [cell_key(Cell(d, e), "token_share") for d in curves.domains for e in curves.efforts]
    if not any(key in curves.keys for key in keys):
        return ""
    stacks = []
    for i, domain in enumerate(curves.domains):
        columns = [curves.values(cell_key(Cell(domain, e), "token_share")) for e in curves.efforts]
        values = [sum(v or 0.0 for v in at_step) for at_step in zip(*columns, strict=True)]
        stacks.append(Series(f"token_share/{domain}", domain, i, curves.steps, values))
    charts = [_figure("by domain", stacked_chart(stacks, "Token share by domain"))]
    return _section("Token share", "Share of the trained tokens of a batch.", charts, list(enumerate(curves.domains)))


def _run_section(curves: Curves, title: str, keys: Sequence[str]) -> str:
    charts = [
        _figure(
            f"{key} <small>{escape(metric_of(key).unit)}</small>",
            line_chart([curves.series(key, key, 7)], key),
            metric_of(key).meaning,
        )
        for key in keys
        if key in curves.keys
    ]
    return _section(title, "", charts, [])


def _time_section(curves: Curves) -> str:
    parts = [part for part in STEP_PARTS if f"time/{part}_s" in curves.keys]
    columns = [[v or 0.0 for v in curves.values(f"time/{part}_s")] for part in parts]
    whole = [v or 0.0 for v in curves.values("time/step_s")]
    rest = [max(0.0, step - sum(known)) for step, *known in zip(whole, *columns, strict=True)]
    names, columns = [*parts, "other"], [*columns, rest]
    total = sum(sum(column) for column in columns) or 1.0
    stacks = [
        Series(f"time/{name}_s", name, i, curves.steps, column)
        for i, (name, column) in enumerate(zip(names, columns, strict=True))
    ]
    legend = [
        (i, f"{name} {sum(column) / total:.0%}") for i, (name, column) in enumerate(zip(names, columns, strict=True))
    ]
    charts = [_figure("seconds per step", stacked_chart(stacks, "Time of a step"))]
    return _section("Time of a step", "Seconds; in the legend, the share of the whole run.", charts, legend)


def _section(title: str, text: str, charts: Sequence[str], legend: Sequence[tuple[int, str]]) -> str:
    keys = "".join(
        f'<span><i class="key {colour_class(colour)}"></i>{escape(label)}</span>' for colour, label in legend
    )
    return (
        f'<section><h2>{title}</h2><p>{escape(text)}</p><div class="legend">{keys}</div>'
        f'<div class="charts">{"".join(charts)}</div></section>'
    )


def _figure(title: str, chart: str, text: str = "") -> str:
    """`title` is HTML, `text` is not."""
    return f"<figure><figcaption>{title}</figcaption>{chart}{f'<p>{escape(text)}</p>' if text else ''}</figure>"


def _configuration(summary: Mapping[str, Any] | None, config: Mapping[str, Any] | None) -> str:
    layout = " · ".join(
        f"{escape(str(k))} <b>{escape(str(v))}</b>" for k, v in (summary["layout"] if summary else {}).items()
    )
    text = write_yaml(redact(config, os.environ)) if config else "no config.yaml in the run folder"
    paragraph = f"<h2>Layout</h2><p>{layout}</p>" if layout else ""
    return f"<section>{paragraph}<details><summary>Configuration</summary><pre>{escape(text)}</pre></details></section>"
