"""What an evaluation measured, policy by policy and cell by cell, and what follows from all cells together.

A score is the share of prompts answered correctly and within the cell's budget; its interval is Wilson's, which holds
near 0 and 1 too. The *oracle-routed ensemble* answers each cell with that cell's own teacher: the student is one model
in place of all of them, and its gap to the ensemble is what that costs. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from megatron_mopd.telemetry.recovery import (
    POLICIES,
    Compared,
    Score,
    average,
    average_compared,
    difference,
    domain_recoveries,
    recoveries,
)

Z_95 = 1.959964


@dataclass(frozen=True)
class Measured:
    """One policy on `prompts` prompts of a cell: means."""

    score: float
    """Correct and within budget."""
    accuracy: float
    """Correct, whatever was spent."""
    spent_tokens: float
    tool_calls: float
    prompts: int

    def __post_init__(self) -> None:
        if not 0.0 <= self.score <= 1.0:
            raise ValueError(f"score {self.score} is not in [0, 1]")
        if self.prompts < 1:
            raise ValueError(f"{self.prompts} prompts")

    @property
    def stderr(self) -> float:
        return math.sqrt(self.score * (1 - self.score) / self.prompts)


@dataclass(frozen=True)
class CellScores:
    """The SFT policy, the cell's teacher and the student in one cell."""

    domain: str
    effort: str
    sft: Measured
    teacher: Measured
    student: Measured

    @property
    def compared(self) -> Compared:
        return Compared(*(Score(m.score, m.stderr) for m in self._measured.values()))

    def as_json(self) -> dict[str, Any]:
        return {
            "domain": self.domain,
            "effort": self.effort,
            **self.compared.as_json(),
            "tokens": self.student.spent_tokens,
            "prompts": self.student.prompts,
            "interval": {name: list(wilson(m.score, m.prompts)) for name, m in self._measured.items()},
            **{
                name: {policy: asdict(m)[name] for policy, m in self._measured.items()}
                for name in ("accuracy", "spent_tokens", "tool_calls")
            },
        }

    @property
    def _measured(self) -> dict[str, Measured]:
        return {name: getattr(self, name) for name in POLICIES}


def wilson(share: float, n: int) -> tuple[float, float]:
    """95 % interval of a share of n. Example: wilson(0.0, 100) == (0.0, 0.0370...)."""
    z2 = Z_95**2 / n
    centre, half = share + z2 / 2, Z_95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n))
    return max(0.0, (centre - half) / (1 + z2)), min(1.0, (centre + half) / (1 + z2))


def scores_summary(cells: Sequence[CellScores]) -> dict[str, Any]:
    """The part of summary.json that follows from the cells; efforts come from the lowest to the highest."""
    names = list(dict.fromkeys(c.domain for c in cells))
    domains = [[c.compared for c in cells if c.domain == name] for name in names]
    of_cells, of_domains = recoveries([c.compared for c in cells]), domain_recoveries(domains)
    return {
        "cells": [c.as_json() for c in cells],
        "mean_recovery": of_cells.mean_capped,
        "mean_recovery_raw": of_cells.mean.value if of_cells.mean else None,
        "mean_recovery_raw_stderr": of_cells.mean.stderr if of_cells.mean else None,
        "worst_recovery": of_cells.worst,
        "cells_without_gap": of_cells.without_gap,
        "domains": [
            {"domain": name, **average_compared(parts).as_json()} for name, parts in zip(names, domains, strict=True)
        ],
        "domain_recovery": of_domains.mean_capped,
        "domain_recovery_raw": of_domains.mean.value if of_domains.mean else None,
        "domain_recovery_raw_stderr": of_domains.mean.stderr if of_domains.mean else None,
        "worst_domain_recovery": of_domains.worst,
        "oracle": _oracle(cells),
        "effort_order_kept": all(
            low.student.spent_tokens < high.student.spent_tokens
            for low, high in pairwise(cells)
            if low.domain == high.domain
        ),
    }


def _oracle(cells: Sequence[CellScores]) -> dict[str, float]:
    """Means over cells; the gap is negative where the student is below."""
    ensemble, student = (average([getattr(c.compared, name) for c in cells]) for name in ("teacher", "student"))
    gap = difference(student, ensemble)
    return {"score": ensemble.value, "student": student.value, "gap": gap.value, "gap_stderr": gap.stderr}
