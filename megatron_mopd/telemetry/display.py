"""What the terminal of rank 0 shows while a run goes on: a live panel, or one plain line per step where there is no
terminal.

Promise: it ends with the last frame in place and the cursor visible, also after an exception or Ctrl-C (use it as a
context manager), and lines that others print meanwhile appear above it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_mopd.telemetry.registry import cell_key
from megatron_mopd.types import Cell

BLOCKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 48
ETA_STEPS = 20
BAR_WIDTH = 6
Row = Mapping[str, float]


class Display:
    """`with Display("quickstart", 60, cells) as display: display.update(step, row)`."""

    def __init__(
        self,
        title: str,
        num_steps: int,
        cells: Sequence[Cell],
        done_steps: int = 0,
        live: bool = True,
        console: Console | None = None,
    ) -> None:
        """`live=False` asks for plain lines on a terminal too. A resumed run starts with `done_steps`."""
        self._title, self._num_steps, self._cells = title, num_steps, cells
        self._console = console or Console()
        self._step, self._row = done_steps, {}
        self._kl: list[float] = []
        self._step_s: deque[float] = deque(maxlen=ETA_STEPS)
        self._start = time.monotonic()
        self._live = None
        if live and self._console.is_terminal:
            self._live = Live(self, console=self._console, refresh_per_second=4, vertical_overflow="visible")

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def update(self, step: int, row: Row) -> None:
        self._step, self._row = step, row
        self._step_s.append(row["time/step_s"])
        if "train/reverse_kl" in row:
            self._kl.append(row["train/reverse_kl"])
        if self._live is None:
            self._console.print(self.line(), highlight=False, markup=False, soft_wrap=True)

    def line(self) -> str:
        """Example: step 7/60  eta 1:23  loss -0.0120  kl 0.4120  clip 1.20%  grad 0.830  score 0.520  ..."""
        parts = [f"step {self._step}/{self._num_steps}", f"eta {_clock(self._eta_s())}"]
        parts += [f"{label} {text}" for label, text in self._figures() if text]
        return "  ".join(parts)

    def __rich__(self) -> Panel:
        parts = [self._progress(), Text("")]
        parts += (
            [self._numbers(), *self._course(), Text(""), *self._grid()]
            if self._row
            else [Text("first step ...", "dim")]
        )
        return Panel(
            Group(*parts), title=Text(self._title, "bold"), border_style="dim", width=min(88, self._console.width)
        )

    def _figures(self) -> list[tuple[str, str]]:
        row = self._row
        return [
            ("loss", _format(row, "train/loss", "{:+.4f}")),
            ("kl", _format(row, "train/reverse_kl", "{:.4f}")),
            ("entropy", _format(row, "train/entropy", "{:.3f}")),
            ("clip", _format(row, "train/clip_fraction", "{:.2%}")),
            ("grad", _format(row, "train/grad_norm", "{:.3f}")),
            ("score", _format(row, "rollout/reward_within_budget", "{:.3f}")),
            ("tok/s", _format(row, "perf/tokens_per_s", "{:,.0f}")),
        ]

    def _progress(self) -> Table:
        bar = Table.grid(padding=(0, 2), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        elapsed = time.monotonic() - self._start
        bar.add_row(
            Text(f"step {self._step}/{self._num_steps}", "bold"),
            ProgressBar(self._num_steps, self._step),
            Text(f"{_clock(elapsed)} elapsed, {_clock(self._eta_s())} left", "dim"),
        )
        return bar

    def _numbers(self) -> Table:
        """Rows of three figures."""
        figures = [(label, text) for label, text in self._figures() if text and label != "kl"]  # see _course
        names = {"clip": "clipped", "grad": "gradient norm", "tok/s": "tokens/s"}
        grid = Table.grid(padding=(0, 3))
        for i in range(0, len(figures), 3):
            cells = [Text.assemble((f"{names.get(n, n)} ", "dim"), (t, "bold")) for n, t in figures[i : i + 3]]
            grid.add_row(*cells)
        return grid

    def _course(self) -> list[Text]:
        if not self._kl:
            return []
        first, last = f"{self._kl[0]:.3f} ", f" {self._kl[-1]:.3f}"
        return [Text.assemble(("reverse KL ", "dim"), first, (sparkline(self._kl, SPARK_WIDTH), "cyan"), last)]

    def _grid(self) -> list[RenderableType]:
        efforts = list(dict.fromkeys(c.effort for c in self._cells))
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("", no_wrap=True)
        for effort in efforts:
            table.add_column(Text(effort), no_wrap=True)
        for domain in dict.fromkeys(c.domain for c in self._cells):
            table.add_row(Text(domain), *(self._cell(Cell(domain, effort)) for effort in efforts))
        return [table, Text("reward within budget, reverse KL", "dim italic")]

    def _cell(self, cell: Cell) -> Text:
        reward = self._row.get(cell_key(cell, "reward_within_budget"))
        if reward is None:
            return Text("-", "dim")
        kl = _format(self._row, cell_key(cell, "reverse_kl"), " {:.3f}")
        full = round(BAR_WIDTH * reward)
        return Text.assemble(
            ("━" * full, "green"), ("━" * (BAR_WIDTH - full), "bright_black"), f" {reward:.2f}", (kl, "dim")
        )

    def _eta_s(self) -> float | None:
        if not self._step_s:
            return None
        return (self._num_steps - self._step) * sum(self._step_s) / len(self._step_s)


def sparkline(values: Sequence[float], width: int) -> str:
    """At most `width` blocks, evenly picked, the last value among them. Example: [3, 2, 1, 0] gives "█▆▃▁"."""
    if len(values) > width:
        values = [values[(i + 1) * len(values) // width - 1] for i in range(width)]
    values = [v for v in values if math.isfinite(v)] or [0.0]
    low, high = min(values), max(values)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((v - low) * scale)] for v in values)


def _format(row: Row, key: str, form: str) -> str:
    return form.format(row[key]) if key in row else ""


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "-:--"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"
