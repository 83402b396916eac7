"""The same-origin gate: how far is each teacher from the student before the first update?

    reverse KL of a teacher = mean over trained tokens of (rollout log-prob - teacher log-prob), of the initial student

Teachers that were trained from the student's own checkpoint start near it; one of another origin starts far away, and
distilling it makes the student worse. Measured on whatever has been sampled and scored: a few trajectories of each
cell by `mopd preflight`, the first batch by `mopd train`, and what is scored of it later where a lane was left behind.

Promises (tests/unit/test_origin.py): the interval is clustered by trajectory, whose tokens are not independent, and
honest for a few of them; a teacher whose mean is above the gate is refused with what was measured, unless
teachers.other_origin names it, and no other is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_mopd.config import Config, Teachers
from megatron_mopd.errors import UserError
from megatron_mopd.types import Graded

T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t for 1, 2, ... degrees of freedom: half of the 95 % interval in standard errors. See `_t_95` for more."""
OUTLIER_SCORE, MIN_TEACHERS = 3.5, 5
"""A teacher is an outlier if 0.6745 |KL - median| / MAD is above the score (Iglewicz and Hoaglin, 1993), and its
interval does not reach the median. Among fewer teachers the deviation from the median says nothing; among nine that
differ by chance, one is flagged in every seventh run."""


@dataclass(frozen=True)
class InitialKL:
    """Nats per trained token; `margin` is half of the 95 % interval, infinite for a single trajectory."""

    teacher: str
    mean: float
    margin: float
    num_trajectories: int
    num_tokens: int

    def __str__(self) -> str:
        margin = "?" if math.isinf(self.margin) else f"{self.margin:.3f}"
        return f"{self.mean:.3f} ± {margin}"


def check_origin(graded: Sequence[Graded], config: Config) -> str:
    """The table to print of a first batch. Raises UserError for teachers above `teachers.max_initial_kl`."""
    return origin_table(_within_gate(graded, config), config)


def check_late(graded: Sequence[Graded], config: Config) -> None:
    """The same of what the initial student has sampled in a later batch: of teachers that were away in the first."""
    _within_gate([g for g in graded if not g.trajectory.weight_versions.any()], config)


def _within_gate(graded: Sequence[Graded], config: Config) -> list[InitialKL]:
    measured, gate = measure(graded), config.teachers.max_initial_kl
    if far := [kl for kl in measured if kl.mean > gate and kl.teacher not in config.teachers.other_origin]:
        raise UserError(
            f"initial reverse KL per token above teachers.max_initial_kl={gate:g}: "
            f"{', '.join(f'teacher {kl.teacher} {kl}' for kl in far)}; take teachers that were trained from "
            f"student.checkpoint={config.student.checkpoint}; or raise the gate if these are, or name them in "
            "teachers.other_origin if they are known not to be"
        )
    return measured


def measure(graded: Sequence[Graded]) -> list[InitialKL]:
    """Of each teacher with a trained token, in order of appearance."""
    sums: dict[str, list[tuple[float, int]]] = {}
    for g in graded:
        mask = g.trajectory.loss_mask
        differences = (g.trajectory.rollout_logprobs.astype(np.float64) - g.teacher_logprobs)[mask]
        if len(differences):
            sums.setdefault(g.teacher, []).append((float(differences.sum()), len(differences)))
    return [_initial_kl(teacher, *np.array(of_teacher).T) for teacher, of_teacher in sums.items()]


def origin_table(measured: Sequence[InitialKL], config: Config) -> str:
    """One line per teacher, warnings last."""
    lines = [
        "initial reverse KL per token, with its 95 % interval over trajectories "
        f"(gate: teachers.max_initial_kl={config.teachers.max_initial_kl:g})"
    ]
    width = max((len(kl.teacher) for kl in measured), default=0)
    for kl in measured:
        lines.append(
            f"  {kl.teacher:{width}}  {kl!s:>15}  {kl.num_tokens} tokens of {kl.num_trajectories} trajectories"
            f"{_remark(kl, config.teachers)}"
        )
    lines += [
        f"  warning: teacher {kl.teacher} is unlike the others, which are around {median:.3f}; is it the right one?"
        for kl, median in outliers(measured)
    ]
    seen = {kl.teacher for kl in measured}
    used = [t.name for t in config.teachers.models if t.cell in config.prompts.cells]
    lines += [f"  warning: teacher {name} has scored nothing and was not measured" for name in used if name not in seen]
    return "\n".join(lines)


def _remark(kl: InitialKL, teachers: Teachers) -> str:
    if kl.mean <= teachers.max_initial_kl:
        return ""
    return "  above the gate" + (", allowed by teachers.other_origin" if kl.teacher in teachers.other_origin else "")


def outliers(measured: Sequence[InitialKL]) -> list[tuple[InitialKL, float]]:
    """Those unlike the others, each with the median of all; see OUTLIER_SCORE."""
    means = np.array([kl.mean for kl in measured])
    if len(means) < MIN_TEACHERS:
        return []
    median = float(np.median(means))
    mad = float(np.median(np.abs(means - median)))
    far = [0.6745 * abs(kl.mean - median) > OUTLIER_SCORE * mad for kl in measured]
    return [
        (kl, median) for kl, is_far in zip(measured, far, strict=True) if is_far and abs(kl.mean - median) > kl.margin
    ]


def _initial_kl(teacher: str, sums_n: np.ndarray, tokens_n: np.ndarray) -> InitialKL:
    """A ratio of two sums over the n trajectories; its variance is the jackknife's, from the ratios without each."""
    n, total = len(sums_n), tokens_n.sum()
    mean = sums_n.sum() / total
    margin = math.inf
    if n > 1:
        shifts_n = (sums_n - mean * tokens_n) / (total - tokens_n)
        margin = _t_95(n - 1) * math.sqrt((n - 1) / n * float(shifts_n @ shifts_n))
    return InitialKL(teacher, float(mean), float(margin), n, int(total))


def _t_95(freedom: int) -> float:
    """Beyond the table by expansion about the normal quantile, to 0.003."""
    if freedom <= len(T_95):
        return T_95[freedom - 1]
    return 1.960 + 2.372 / freedom + 2.823 / freedom**2
