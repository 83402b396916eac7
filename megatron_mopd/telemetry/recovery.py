"""Recovery: how much of the teacher's gain over the SFT policy the student has, per (domain, effort) cell.

    recovery = (student - sft) / (teacher - sft)

Scores are shares of prompts answered correctly and within the cell's budget. 0 is the SFT policy, 1 the teacher; the
number is unbounded, and noisy where the gap is small. So it stands beside its standard error, and the mean is given
both raw and with each cell capped at 1, so that one inflated cell cannot hide a bad one.

A cell whose teacher does not beat the SFT policy has no gap to recover: its recovery is None, it is left out of the
means and of the worst, and the summary counts it in `cells_without_gap`. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CellScores:
    """What the evaluation measured in one cell: three scores in [0, 1] on `prompts` prompts each.

    `tokens` is the student's mean of tokens that count against the budget.
    Example: CellScores("general", "low", sft=0.31, teacher=0.53, student=0.5, tokens=3.1, prompts=512).recovery ==
    0.86...
    """

    domain: str
    effort: str
    sft: float
    teacher: float
    student: float
    tokens: float
    prompts: int

    def __post_init__(self) -> None:
        for name in ("sft", "teacher", "student"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{self.domain}/{self.effort}: {name} score {getattr(self, name)} is not in [0, 1]")
        if self.prompts < 1:
            raise ValueError(f"{self.domain}/{self.effort}: {self.prompts} prompts")

    @property
    def recovery(self) -> float | None:
        gap = self.teacher - self.sft
        return (self.student - self.sft) / gap if gap > 0 else None

    @property
    def recovery_stderr(self) -> float | None:
        """First-order standard error, the three scores taken as independent binomial means.

        With r the recovery, var(r) = (var(student) + r^2 var(teacher) + (1 - r)^2 var(sft)) / gap^2. The three policies
        answer the same prompts, which correlates their scores, so this errs on the large side.
        """
        r = self.recovery
        if r is None:
            return None
        variance = (
            self.stderr("student") ** 2 + r**2 * self.stderr("teacher") ** 2 + (1 - r) ** 2 * self.stderr("sft") ** 2
        )
        return math.sqrt(variance) / (self.teacher - self.sft)

    def stderr(self, name: str) -> float:
        """Binomial standard error of the score `sft`, `teacher` or `student`."""
        p: float = getattr(self, name)
        return math.sqrt(p * (1 - p) / self.prompts)

    def as_json(self) -> dict[str, Any]:
        return {
            "domain": self.domain,
            "effort": self.effort,
            "sft": self.sft,
            "teacher": self.teacher,
            "student": self.student,
            "recovery": self.recovery,
            "tokens": self.tokens,
            "stderr": {
                **{name: self.stderr(name) for name in ("sft", "teacher", "student")},
                "recovery": self.recovery_stderr,
            },
            "prompts": self.prompts,
        }


def recovery_summary(cells: Sequence[CellScores]) -> dict[str, Any]:
    """`mean_recovery` (capped at 1 per cell), `mean_recovery_raw` with its standard error, `worst_recovery`.

    All are None when no cell has a gap.
    """
    with_gap = [(c.recovery, c.recovery_stderr) for c in cells]
    known = [(r, e) for r, e in with_gap if r is not None and e is not None]
    n = len(known)
    return {
        "mean_recovery": math.fsum(min(1.0, r) for r, _ in known) / n if n else None,
        "mean_recovery_raw": math.fsum(r for r, _ in known) / n if n else None,
        "mean_recovery_raw_stderr": math.sqrt(math.fsum(e**2 for _, e in known)) / n if n else None,
        "worst_recovery": min((r for r, _ in known), default=None),
        "cells_without_gap": len(cells) - n,
    }
