"""`mopd eval-table`: the evaluations of several runs in one table, with standard errors over seeds.

    mopd eval-table runs/s0 runs/s1 runs/s2                   one method: its cells, then its line
    mopd eval-table mopd=runs/s0,runs/s1 average=runs/a0,...  a line per method
    ... --out table.md (or table.json)                        written as well

The runs of one name differ in their seed alone; each has been evaluated (`mopd eval`). A number is the mean over seeds,
its standard error the deviation over seeds / sqrt(seeds); one seed has none. Torch-free.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_mopd.errors import UserError
from megatron_mopd.telemetry.record import replace_file
from megatron_mopd.telemetry.recovery import POLICIES
from megatron_mopd.telemetry.summary import read_summary

Summary = Mapping[str, Any]
Statistic = dict[str, Any]
"""{"mean", "stderr", "seeds"}: None where no seed, or only one, has the number."""

METHOD_COLUMNS = {
    "mean_recovery": "mean recovery, capped per cell",
    "mean_recovery_raw": "raw",
    "worst_recovery": "worst cell",
    "domain_recovery_raw": "by domain",
    "worst_domain_recovery": "worst domain",
    "student": "score",
    "gap": "against oracle routing",
    "effort_order_kept": "effort order kept",
}
USAGE = "usage: mopd eval-table RUN [RUN ...] | NAME=RUN[,RUN ...] [NAME=...], then --out FILE.json or FILE.md"


def run_command(words: list[str]) -> None:
    words, out = _out_file(words)
    groups = parse_groups(words)
    summaries = {name: [_summary_of(run) for run in runs] for name, runs in groups.items()}
    _check_same_cells([(run, s) for name in groups for run, s in zip(groups[name], summaries[name], strict=True)])
    table = eval_table(summaries)
    console = Console()
    if len(table["methods"]) == 1:
        console.print(_cells_table(table["methods"][0]))
    console.print(_methods_table(table))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(out, as_markdown(table) if out.suffix == ".md" else json.dumps(table, indent=2) + "\n")


def parse_groups(words: Sequence[str]) -> dict[str, list[Path]]:
    """Name to its runs. Words without a name are the runs of one method."""
    named = [word for word in words if "=" in word and "/" not in word.partition("=")[0]]
    if not words or any(word.startswith("-") for word in words) or 0 < len(named) < len(words):
        raise UserError(USAGE)
    if not named:
        return {"student": _different([Path(word) for word in words])}
    groups: dict[str, list[Path]] = {}
    for word in named:
        name, _, runs = word.partition("=")
        if name in groups or not all(runs.split(",")):
            raise UserError(f"{word}: name each method once, and its runs as NAME=RUN,RUN")
        groups[name] = _different([Path(run) for run in runs.split(",")])
    return groups


def _different(runs: list[Path]) -> list[Path]:
    """A run that counts twice would make an error too small."""
    for i, run in enumerate(runs):
        if run.resolve() in [other.resolve() for other in runs[:i]]:
            raise UserError(f"{run} is named twice; name each seed of a method once")
    return runs


def eval_table(summaries: Mapping[str, Sequence[Summary]]) -> dict[str, Any]:
    """Name to the summaries of its seeds, as numbers."""
    return {"methods": [_method(name, of_seeds) for name, of_seeds in summaries.items()]}


def statistic(values: Sequence[float | None]) -> Statistic:
    """Seeds without the number (no cell had a gap) are left out, and `seeds` says of how many it is."""
    known = [v for v in values if v is not None]
    stderr = statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else None
    return {"mean": statistics.fmean(known) if known else None, "stderr": stderr, "seeds": len(known)}


def as_markdown(table: Mapping[str, Any]) -> str:
    """The methods; below, the cells of each."""
    lines = [_markdown_row(["", *METHOD_COLUMNS.values()]), "|---" * (1 + len(METHOD_COLUMNS)) + "|"]
    lines += [_markdown_row([m["name"], *_method_texts(m)]) for m in table["methods"]]
    for m in table["methods"]:
        efforts = list(dict.fromkeys(c["effort"] for c in m["cells"]))
        lines += [
            "",
            _markdown_row([f"{m['name']}: SFT → student / teacher", *efforts]),
            "|---" * (1 + len(efforts)) + "|",
        ]
        for domain in dict.fromkeys(c["domain"] for c in m["cells"]):
            texts = {c["effort"]: _cell_text(c) for c in m["cells"] if c["domain"] == domain}
            lines.append(_markdown_row([domain, *(texts.get(e, "-") for e in efforts)]))
    return "\n".join(lines) + "\n"


def _out_file(words: list[str]) -> tuple[list[str], Path | None]:
    if "--out" not in words:
        return words, None
    at = words.index("--out")
    file = Path(words[at + 1]) if at + 1 < len(words) else Path()
    if file.suffix not in (".md", ".json"):
        raise UserError(USAGE)
    return [*words[:at], *words[at + 2 :]], file


def _summary_of(run: Path) -> Summary:
    summary = read_summary(run)
    if summary is None or "oracle" not in summary:
        raise UserError(f"{run} has no summary.json of this version; run mopd eval with run.folder={run} first")
    return summary


def _check_same_cells(summaries: Sequence[tuple[Path, Summary]]) -> None:
    """Of all methods: they stand in one table to be compared."""
    cells = [[(c["domain"], c["effort"], c["prompts"]) for c in summary["cells"]] for _, summary in summaries]
    for (run, _), others in zip(summaries, cells, strict=True):
        if others != cells[0]:
            raise UserError(
                f"{summaries[0][0]} and {run} were evaluated on different cells or numbers of prompts; evaluate them "
                "alike"
            )


def _method(name: str, of_seeds: Sequence[Summary]) -> dict[str, Any]:
    flat = [{**summary, **summary["oracle"]} for summary in of_seeds]
    return {
        "name": name,
        "runs": len(of_seeds),
        **{key: statistic([_number(summary[key]) for summary in flat]) for key in METHOD_COLUMNS},
        "cells": [_cell(cells) for cells in zip(*(summary["cells"] for summary in of_seeds), strict=True)],
    }


def _number(value: float | bool | None) -> float | None:
    return None if value is None else float(value)


def _cell(of_seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first = of_seeds[0]
    return {
        "domain": first["domain"],
        "effort": first["effort"],
        **{key: statistic([cell[key] for cell in of_seeds]) for key in (*POLICIES, "recovery", "tokens")},
        "tool_calls": statistic([cell["tool_calls"]["student"] for cell in of_seeds]),
    }


def _methods_table(table: Mapping[str, Any]) -> Table:
    drawn = Table(title="Mean ± standard error over seeds", title_style="bold")
    for title in ("", *METHOD_COLUMNS.values()):
        drawn.add_column(title)
    for method in table["methods"]:
        drawn.add_row(Text(method["name"]), *map(Text, _method_texts(method)))
    return drawn


def _cells_table(method: Mapping[str, Any]) -> Table:
    efforts = list(dict.fromkeys(c["effort"] for c in method["cells"]))
    drawn = Table(title="SFT → student / teacher, recovery, tokens", title_style="bold", show_lines=True)
    drawn.add_column("domain")
    for effort in efforts:
        drawn.add_column(Text(effort))
    for domain in dict.fromkeys(c["domain"] for c in method["cells"]):
        texts = {c["effort"]: _cell_text(c) for c in method["cells"] if c["domain"] == domain}
        drawn.add_row(Text(domain), *(Text(texts.get(e, "-")) for e in efforts))
    return drawn


def _method_texts(method: Mapping[str, Any]) -> list[str]:
    texts = [_text(method[key], signed=key == "gap") for key in METHOD_COLUMNS if key != "effort_order_kept"]
    kept = method["effort_order_kept"]
    return [*texts, f"{round(kept['mean'] * kept['seeds'])} of {kept['seeds']}"]


def _cell_text(cell: Mapping[str, Any]) -> str:
    scores = f"{_text(cell['sft'])} → {_text(cell['student'])} / {_text(cell['teacher'])}"
    return f"{scores}; {_text(cell['recovery'])}; {_text(cell['tokens'], digits=1)} tokens"


def _text(of: Statistic, signed: bool = False, digits: int = 3) -> str:
    if of["mean"] is None:
        return "no gap"
    mean = f"{of['mean']:{'+' if signed else ''}.{digits}f}"
    return mean if of["stderr"] is None else f"{mean} ± {of['stderr']:.{digits}f}"


def _markdown_row(texts: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"
