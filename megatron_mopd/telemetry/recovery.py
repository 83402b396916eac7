"""Recovery: how much of the teachers' gain over the SFT policy the student has.

    recovery = (student - sft) / (teacher - sft)

0 is the SFT policy, 1 the teacher; the number is unbounded. It is taken of a (domain, effort) cell, or, as in the MOPD
paper (arXiv 2606.30406), of a domain: the raw scores are averaged within the domain *first*, then normalised, then
the domains are averaged. (A mean of the ratios of single scores is another number.)

The ratio is noise where the gap is. A gap that is not above NOISE_STDERRS standard errors has no recovery: None, left
out of means and of the worst, and counted. What remains stands beside its standard error, and means are given both raw
and with each part capped at 1, so that one inflated part cannot hide a bad one. Torch-free. Promises
(tests/unit/test_recovery.py): the paper's published table comes out to four digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

NOISE_STDERRS = 2.0
POLICIES = ("sft", "teacher", "student")


class Score(NamedTuple):
    value: float
    stderr: float = 0.0


@dataclass(frozen=True)
class Compared:
    """Three policies on the same prompts: of a benchmark, of a cell, of a domain."""

    sft: Score
    teacher: Score
    student: Score

    @property
    def gap(self) -> Score:
        return difference(self.teacher, self.sft)

    @property
    def recovery(self) -> Score | None:
        """None where the gap is within noise.

        First-order standard error: with r the recovery, var(r) = (var(student) + r^2 var(teacher) + (1 - r)^2 var(sft))
        / gap^2, the scores taken as independent. They come from the same prompts, so this errs on the large side.
        """
        if self.gap.value <= NOISE_STDERRS * self.gap.stderr:
            return None
        r = (self.student.value - self.sft.value) / self.gap.value
        parts = (self.student.stderr, r * self.teacher.stderr, (1 - r) * self.sft.stderr)
        return Score(r, math.hypot(*parts) / self.gap.value)

    def as_json(self) -> dict[str, Any]:
        r = self.recovery
        return {
            **{name: getattr(self, name).value for name in POLICIES},
            "recovery": r.value if r else None,
            "stderr": {
                **{name: getattr(self, name).stderr for name in POLICIES},
                "recovery": r.stderr if r else None,
            },
        }


class Recoveries(NamedTuple):
    """Over several parts; all None where none has a gap."""

    mean_capped: float | None
    mean: Score | None
    worst: float | None
    without_gap: int


def difference(a: Score, b: Score) -> Score:
    return Score(a.value - b.value, math.hypot(a.stderr, b.stderr))


def average(scores: Sequence[Score]) -> Score:
    return Score(
        math.fsum(s.value for s in scores) / len(scores), math.hypot(*(s.stderr for s in scores)) / len(scores)
    )


def average_compared(parts: Sequence[Compared]) -> Compared:
    """Raw scores, averaged policy by policy."""
    return Compared(*(average([getattr(part, name) for part in parts]) for name in POLICIES))


def recoveries(parts: Sequence[Compared]) -> Recoveries:
    known = [r for part in parts if (r := part.recovery) is not None]
    if not known:
        return Recoveries(None, None, None, len(parts))
    capped = average([Score(min(1.0, r.value)) for r in known])
    return Recoveries(capped.value, average(known), min(r.value for r in known), len(parts) - len(known))


def domain_recoveries(domains: Sequence[Sequence[Compared]]) -> Recoveries:
    """The paper's form: average within each domain, then normalise, then average over domains."""
    return recoveries([average_compared(parts) for parts in domains])
