"""Charts as inline SVG, without a plotting library and without scripts: lines, stacked areas, and the
SFT-student-teacher track.

Colours are the classes `s0`, `s1`, ... of the page's style sheet, so that a chart follows a light or a dark page. Every
drawn series carries `data-series` with its metric. A None in a series is a gap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 380, 200
LEFT, RIGHT, TOP, BOTTOM = 48, 10, 10, 26
Y_TICKS, X_TICKS = 4, 6
NUM_COLOURS = 8
MAX_POINTS = 300
"""A longer series is drawn as the means of this many stretches of steps."""


@dataclass(frozen=True)
class Series:
    """`metric` names it in the page's source, `label` for the reader; `colour` indexes the classes, round and round."""

    metric: str
    label: str
    colour: int
    steps: Sequence[int]
    values: Sequence[float | None]

    @property
    def css_class(self) -> str:
        return colour_class(self.colour)


@dataclass(frozen=True)
class Axes:
    """Data to pixels."""

    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, step: float) -> float:
        return LEFT + (step - self.x0) / ((self.x1 - self.x0) or 1) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y0) / ((self.y1 - self.y0) or 1) * (HEIGHT - TOP - BOTTOM)


def line_chart(series: Sequence[Series], title: str, y_range: tuple[float, float] | None = None) -> str:
    """Lines over steps; `y_range` lets neighbouring charts share an axis (see `value_range`)."""
    thinned = [_thin(s) for s in series]
    axes = _axes(thinned, y_range or value_range([v for s in thinned for v in s.values if v is not None]))
    lines = [
        f'<path class="line {s.css_class}" data-series="{escape(s.metric)}" d="{_line_path(s, axes)}">'
        f"<title>{escape(_last_value(s))}</title></path>"
        for s in thinned
    ]
    return _svg(title, _grid(axes) + "".join(lines))


def stacked_chart(series: Sequence[Series], title: str) -> str:
    """Areas that add up; the first series lies at the bottom. All series have the same steps."""
    thinned = [_thin(s) for s in series]
    floor = [0.0] * len(thinned[0].steps)
    layers: list[tuple[Series, list[float], list[float]]] = []
    for s in thinned:
        roof = [below + (value or 0.0) for below, value in zip(floor, s.values, strict=True)]
        layers.append((s, floor, roof))
        floor = roof
    axes = _axes(thinned, _round_range(0.0, max(floor, default=1.0)))
    areas = [
        f'<path class="area {s.css_class}" data-series="{escape(s.metric)}" d="{_area_path(s.steps, low, high, axes)}">'
        f"<title>{escape(_last_value(s))}</title></path>"
        for s, low, high in layers
    ]
    return _svg(title, _grid(axes) + "".join(areas))


def track(sft: float, student: float, teacher: float, student_stderr: float, level: str) -> str:
    """One cell of the grid, from 0 to 1: a ring for SFT, a bar to the teacher, a dot with error bar for the student."""
    x = {name: 6 + 188 * value for name, value in (("sft", sft), ("student", student), ("teacher", teacher))}
    low, high = (6 + 188 * min(1.0, max(0.0, student + sign * student_stderr)) for sign in (-1, 1))
    a, b = sorted((x["sft"], x["teacher"]))
    return (
        f'<svg class="track" viewBox="0 0 200 28" role="img" '
        f'aria-label="SFT {sft:.2f}, student {student:.2f}, teacher {teacher:.2f}">'
        '<path class="axis" d="M6 14H194"/>'
        f'<path class="gap" d="M{a:.1f} 14H{b:.1f}"/>'
        f'<path class="teacher" d="M{x["teacher"]:.1f} 5V23"/>'
        f'<circle class="sft" cx="{x["sft"]:.1f}" cy="14" r="4"/>'
        f'<path class="error {level}" d="M{low:.1f} 14H{high:.1f}M{low:.1f} 10V18M{high:.1f} 10V18"/>'
        f'<circle class="student {level}" cx="{x["student"]:.1f}" cy="14" r="5"/></svg>'
    )


def bars(values: Sequence[float | None], title: str, y_range: tuple[float, float]) -> str:
    """One small bar from 0 per value, none for None; `y_range` holds 0 and is that of all charts beside it."""
    low, high = y_range
    zero, scale = 2 + 24 * high / (high - low), 24 / (high - low)
    drawn = [
        f'<path d="M{12 * i + 2} {zero:.1f}V{zero - scale * v:.1f}H{12 * i + 11}V{zero:.1f}Z">'
        f"<title>{i + 1}: {v:.4g}</title></path>"
        for i, v in enumerate(values)
        if v is not None
    ]
    width = 12 * len(values) + 1
    return (
        f'<svg class="bars" viewBox="0 0 {width} 28" role="img" aria-label="{escape(title)}">'
        f'<path class="axis" d="M0 {zero:.1f}H{width}"/>{"".join(drawn)}</svg>'
    )


def value_range(values: Sequence[float]) -> tuple[float, float]:
    """A y-axis for all of them, from tick to tick, that holds 0."""
    return _round_range(min(0.0, *values, 0.0), max(0.0, *values, 0.0))


def colour_class(colour: int) -> str:
    return f"s{colour % NUM_COLOURS}"


def _thin(s: Series) -> Series:
    size = math.ceil(len(s.steps) / MAX_POINTS)
    if size <= 1:
        return s
    steps, values = [], []
    for start in range(0, len(s.steps), size):
        known = [v for v in s.values[start : start + size] if v is not None]
        steps.append(s.steps[start])
        values.append(sum(known) / len(known) if known else None)
    return Series(s.metric, s.label, s.colour, steps, values)


def _axes(series: Sequence[Series], y_range: tuple[float, float]) -> Axes:
    steps = [step for s in series for step in s.steps]
    y0, y1 = y_range
    return Axes(min(steps, default=0), max(steps, default=1), y0, y1 if y1 > y0 else y0 + 1)


def _line_path(s: Series, axes: Axes) -> str:
    parts, pen = [], "M"
    for step, value in zip(s.steps, s.values, strict=True):
        if value is None:
            pen = "M"
            continue
        parts.append(f"{pen}{axes.x(step):.1f} {axes.y(value):.1f}")
        pen = "L"
    return "".join(parts)


def _area_path(steps: Sequence[int], low: Sequence[float], high: Sequence[float], axes: Axes) -> str:
    there = [f"{axes.x(step):.1f} {axes.y(v):.1f}" for step, v in zip(steps, high, strict=True)]
    back = [f"{axes.x(step):.1f} {axes.y(v):.1f}" for step, v in zip(steps, low, strict=True)]
    return "M" + "L".join(there + back[::-1]) + "Z"


def _grid(axes: Axes) -> str:
    parts = []
    for value in _ticks(axes.y0, axes.y1, Y_TICKS):
        y = axes.y(value)
        parts.append(f'<path class="rule" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{value + 0.0:,.6g}</text>')
    for step in _ticks(axes.x0, axes.x1, X_TICKS):
        if step == int(step):
            x = axes.x(step)
            parts.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{int(step)}</text>')
    return "".join(parts)


def _ticks(low: float, high: float, about: int) -> list[float]:
    if high <= low:
        return [low]
    size = _tick_size(low, high, about)
    first, last = math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9)
    return [i * size for i in range(first, last + 1)]


def _round_range(low: float, high: float) -> tuple[float, float]:
    if high <= low:
        return low, low + 1.0
    size = _tick_size(low, high, Y_TICKS)
    return math.floor(low / size + 1e-9) * size, math.ceil(high / size - 1e-9) * size


def _tick_size(low: float, high: float, about: int) -> float:
    """1, 2, 2.5 or 5 times a power of ten, such that about so many fit."""
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    return next(n * power for n in (1, 2, 2.5, 5, 10) if n * power >= raw * (1 - 1e-9))


def _last_value(s: Series) -> str:
    known = [v for v in s.values if v is not None]
    return f"{s.label}: {known[-1]:.4g} at the last step" if known else s.label


def _svg(title: str, inside: str) -> str:
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{inside}</svg>'
