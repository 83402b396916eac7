"""What tools/bench_head.py has measured: as lines, as head.csv, and as bars in head.svg."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from pathlib import Path

COLORS = {"floor": "#888888", "ours": "#2a6f4e"}
OTHERS = "#4878a8"


@dataclass
class Row:
    """What was measured of a method. Errors are relative but for a log-prob's; `plain` ones are of logits from which
    only the target's stands out. Not a number where they were not measured, and nothing in head.csv."""

    device: str
    shape: str
    tp: int
    method: str
    ratio: float
    seconds: float
    scratch: float
    collectives: int
    logprob_error: float = math.nan
    hidden_error: float = math.nan
    weight_error: float = math.nan
    plain_hidden_error: float = math.nan
    plain_weight_error: float = math.nan
    reward_error: float = math.nan
    sign_flips: float = math.nan

    @property
    def group(self) -> tuple[str, str, int]:
        return self.device, self.shape, self.tp


def table(rows: list[Row]) -> str:
    """Of one shape."""
    titles = ("ratio", "s", "scratch", "coll.", "log p", "dH", "dW", "plain dH", "plain dW", "reward", "flips")
    lines = [f"T, D, V = {rows[0].shape}, tp {rows[0].tp}, {rows[0].device}"]
    lines.append(f"{'method':15}" + "".join(f"{title:>9}" for title in titles))
    for r in rows:
        of_competing = r.logprob_error, r.hidden_error, r.weight_error
        errors = (*of_competing, r.plain_hidden_error, r.plain_weight_error, r.reward_error)
        measured = f"{r.ratio:9.2f}{r.seconds:9.3f}{r.scratch:9.2f}{r.collectives:9}"
        lines.append(f"{r.method:15}{measured}{''.join(f'{x:9.1e}' for x in errors)}{r.sign_flips:9.1%}")
    return "\n".join(lines)


def write(rows: list[Row], folder: Path) -> None:
    """Into head.csv, in place of the rows of the same device, shape, ranks and method; and all rows into head.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    file, new = folder / "head.csv", {(*row.group, row.method) for row in rows}
    kept = [row for row in _read(file) if (*row.group, row.method) not in new] if file.exists() else []
    order = list(dict.fromkeys(row.shape for row in [*kept, *rows]))
    found = sorted([*kept, *rows], key=lambda row: (row.device, order.index(row.shape), row.tp, row.method != "floor"))
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, [f.name for f in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _written(value) for name, value in asdict(row).items()} for row in found)
    (folder / "head.svg").write_text(bars(found))


def _written(value: str | int | float) -> str:
    if not isinstance(value, float):
        return str(value)
    return "" if math.isnan(value) else f"{value:.4g}"


def _read(file: Path) -> Iterable[Row]:
    types = {"str": str, "int": int, "float": float}
    with file.open(newline="") as stream:
        for line in csv.DictReader(stream):
            yield Row(**{f.name: types[str(f.type)](line[f.name] or "nan") for f in fields(Row)})


def bars(rows: list[Row]) -> str:
    """A bar for each ratio, in a group for each shape and number of ranks; the line is the floor."""
    height, unit, left, y = 18, 160, 140, 0
    parts = []
    for (device, shape, tp), group in groupby(rows, key=lambda row: row.group):
        y += 24
        parts.append(f'<text x="8" y="{y}" font-weight="bold">T, D, V = {shape}, tp {tp}, {device}</text>')
        top, y = y + 4, y + 8
        for r in group:
            width = r.ratio * unit
            color = COLORS.get(r.method, OTHERS)
            parts.append(f'<text x="{left - 8}" y="{y + 12}" text-anchor="end">{r.method}</text>')
            parts.append(f'<rect x="{left}" y="{y}" width="{width:.0f}" height="{height - 4}" fill="{color}"/>')
            parts.append(f'<text x="{left + 6 + width:.0f}" y="{y + 12}">{r.ratio:.2f}</text>')
            y += height
        parts.append(f'<line x1="{left + unit}" y1="{top}" x2="{left + unit}" y2="{y}" stroke="#c03030"/>')
    size = f'width="{left + 60 + int(max(r.ratio for r in rows) * unit)}" height="{y + 10}"'
    style = 'font-family="sans-serif" font-size="11"'
    ground = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', ground, *parts, "</svg>\n"])
