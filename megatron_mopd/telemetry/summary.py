"""`summary.json`, the outcome of a run in one file, and the same as a table for the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_mopd.errors import UserError
from megatron_mopd.telemetry.cell_scores import CellScores, scores_summary
from megatron_mopd.telemetry.record import replace_file

FILE_NAME = "summary.json"
_KEYS = {"cells", "mean_recovery", "mean_recovery_raw", "mean_recovery_raw_stderr", "worst_recovery", "wall_s"}
_CELL_KEYS = {"domain", "effort", "sft", "teacher", "student", "recovery", "tokens", "stderr"}
"""What readers of a summary rely on."""


def write_summary(
    run_folder: Path,
    cells: Sequence[CellScores],
    rows: Sequence[Mapping[str, Any]],
    wall_s: float,
    layout: Mapping[str, Any],
) -> dict[str, Any]:
    """Write and return the summary: the cells, the recoveries, the first and last reverse KL of the record's rows, time
    and layout."""
    kl = [row["metrics"]["train/reverse_kl"] for row in rows if "train/reverse_kl" in row["metrics"]]
    summary = {
        **scores_summary(cells),
        "reverse_kl_first": kl[0] if kl else None,
        "reverse_kl_last": kl[-1] if kl else None,
        "steps": len(kl),
        "wall_s": wall_s,
        "layout": dict(layout),
    }
    replace_file(run_folder / FILE_NAME, json.dumps(summary, indent=2, allow_nan=False) + "\n")
    return summary


def read_summary(run_folder: Path) -> dict[str, Any] | None:
    """The summary of a run that has been evaluated. UserError where the file is something else."""
    file = run_folder / FILE_NAME
    if not file.is_file():
        return None
    try:
        summary = json.loads(file.read_bytes())
        complete = summary.keys() >= _KEYS and all(cell.keys() >= _CELL_KEYS for cell in summary["cells"])
    except (ValueError, AttributeError, TypeError):
        complete = False
    if not complete:
        raise UserError(f"{file} is not a summary of this project; run mopd eval again, or remove it")
    return summary


def print_summary(summary: Mapping[str, Any], console: Console) -> None:
    """The grid of student against teacher, domains down, efforts across."""
    efforts = list(dict.fromkeys(c["effort"] for c in summary["cells"]))
    table = Table(title="Correct and within budget", caption=_caption(summary), title_style="bold", show_lines=True)
    table.add_column("domain")
    for effort in efforts:
        table.add_column(Text(effort), no_wrap=True)
    for domain in dict.fromkeys(c["domain"] for c in summary["cells"]):
        by_effort = {c["effort"]: c for c in summary["cells"] if c["domain"] == domain}
        table.add_row(Text(domain), *(_cell_text(by_effort[e]) if e in by_effort else Text("-") for e in efforts))
    console.print(table)


def percent(recovery: float | None, stderr: float | None = None) -> str:
    """Example: percent(0.913, 0.04) == "91 ± 4 %"; a cell without a gap is "no gap"."""
    if recovery is None:
        return "no gap"
    return f"{100 * recovery:.0f} %" if stderr is None else f"{100 * recovery:.0f} ± {100 * stderr:.0f} %"


def recovery_level(recovery: float | None) -> str:
    """good from 0.9, fair from 0.7, poor below: the levels at which tables are coloured."""
    if recovery is None:
        return "none"
    return "good" if recovery >= 0.9 else "fair" if recovery >= 0.7 else "poor"


def _cell_text(cell: Mapping[str, Any]) -> Text:
    colour = {"good": "green", "fair": "yellow", "poor": "red", "none": "dim"}[recovery_level(cell["recovery"])]
    return Text.assemble(
        (f"{cell['sft']:.2f}", "dim"),
        " → ",
        (f"{cell['student']:.2f}", "bold"),
        f" | {cell['teacher']:.2f}\n",
        (percent(cell["recovery"], cell["stderr"]["recovery"]), colour),
        (f"\n{cell['tokens']:.1f} tokens", "dim"),
    )


def _caption(summary: Mapping[str, Any]) -> str:
    return (
        "SFT → student | teacher; recovery of the teacher's gain; tokens spent\n"
        f"mean recovery {percent(summary['mean_recovery'])} (capped at 100 per cell), "
        f"raw {percent(summary['mean_recovery_raw'], summary['mean_recovery_raw_stderr'])}, "
        f"worst {percent(summary['worst_recovery'])}\n"
        f"{_domain_line(summary)}"
        f"reverse KL {_number(summary['reverse_kl_first'])} → {_number(summary['reverse_kl_last'])} "
        f"in {summary['steps']} steps, {summary['wall_s']:.0f} s"
    )


def _domain_line(summary: Mapping[str, Any]) -> str:
    """Empty for a summary of before these numbers."""
    if "oracle" not in summary:
        return ""
    raw = percent(summary["domain_recovery_raw"], summary["domain_recovery_raw_stderr"])
    gap = 100 * summary["oracle"]["gap"]
    return (
        f"by domain {raw}, worst {percent(summary['worst_domain_recovery'])}; "
        f"oracle routing {gap:+.1f} ± {100 * summary['oracle']['gap_stderr']:.1f} points\n"
    )


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.3f}"
