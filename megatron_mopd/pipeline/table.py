"""The status table of a pipeline: what is done, what is at work, what is not and why. Reads records and locks alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_mopd.pipeline.graph import Pipeline, Stage
from megatron_mopd.pipeline.stamps import Record, Stamps
from megatron_mopd.run_lock import try_lock

COLOURS = {"done": "green", "running": "cyan", "failed": "red", "interrupted": "yellow", "out of date": "yellow"}


class Line(NamedTuple):
    stage: Stage
    state: str
    record: Record | None
    note: str


def status(pipeline: Pipeline) -> list[Line]:
    stamps = Stamps(pipeline)
    done = stamps.done()
    return [_line(stage, stamps, done) for stage in pipeline.ordered]


def _line(stage: Stage, stamps: Stamps, done: set[str]) -> Line:
    record = stamps.read(stage)
    if stage.name in done:
        return Line(stage, "done", record, "")
    state, note = _unfinished_state(record, is_locked(stamps.lock_file(stage))), ""
    if missing := [need for need in stage.needs if need not in done]:
        note = f"waits for {', '.join(missing)}"
    elif record is None and state != "running":
        state = "ready"
    elif state == "failed":
        note = f"see {stamps.log_file(stage)}"
    return Line(stage, state, record, note)


def _unfinished_state(record: Record | None, at_work: bool) -> str:
    if at_work:
        return "running"
    if record is None:
        return "not begun"
    return {"begun": "interrupted", "failed": "failed", "done": "out of date"}[record.state]


def is_locked(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("a") as opened:
        return not try_lock(opened.fileno())


def print_status(pipeline: Pipeline, console: Console) -> bool:
    """Print the table; whether all is done."""
    lines = status(pipeline)
    num_done = sum(line.state == "done" for line in lines)
    table = Table(title=f"{pipeline.folder}: {num_done} of {len(lines)} stages done", title_style="bold")
    for name in ("stage", "state", "seconds", "product", "note"):
        table.add_column(name, justify="right" if name == "seconds" else "left", overflow="fold")
    for line in lines:
        seconds = line.record.seconds if line.record else None
        table.add_row(
            Text(line.stage.name),
            Text(line.state, style=COLOURS.get(line.state, "dim")),
            "" if seconds is None else f"{seconds:.0f}",
            Text(os.path.relpath(line.stage.produces, pipeline.folder)),
            Text(line.note),
        )
    console.print(table)
    return num_done == len(lines)
