"""The record of a run as series over its steps, for the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_mopd.telemetry.registry import split_cell_key
from megatron_mopd.telemetry.svg import Series
from megatron_mopd.types import Cell


class Curves:
    """One series per metric, None where a step has no number."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any] | None) -> None:
        """Domains and efforts come in the order of the configuration: efforts go from the lowest to the highest."""
        self.steps = [row["step"] for row in rows]
        self._rows = [{**row["metrics"], **row["timing"]} for row in rows]
        self.keys = list(dict.fromkeys(key for row in self._rows for key in row))
        self._cells = {of[0] for key in self.keys if (of := split_cell_key(key))}
        prompts = config["prompts"] if config else {"mixture": {}, "efforts": {}}
        self.domains = list(dict.fromkeys([*prompts["mixture"], *sorted(c.domain for c in self._cells)]))
        self.efforts = list(dict.fromkeys([*prompts["efforts"], *sorted(c.effort for c in self._cells)]))

    def series(self, key: str, label: str, colour: int) -> Series:
        return Series(key, label, colour, self.steps, self.values(key))

    def values(self, key: str) -> list[float | None]:
        return [row.get(key) for row in self._rows]

    def last_mean(self, key: str, steps: int) -> float | None:
        """Over the last so many steps; None where none of them has a number."""
        known = [v for v in self.values(key)[-steps:] if v is not None]
        return sum(known) / len(known) if known else None

    @property
    def cells(self) -> list[Cell]:
        """Those of which something was measured, as domains and efforts come."""
        return [cell for d in self.domains for e in self.efforts if (cell := Cell(d, e)) in self._cells]
