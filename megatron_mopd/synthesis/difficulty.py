"""How many tasks of each difficulty a set gets.

`counts` apportions a set by weights; `informative_weights` gives weights from measured pass rates: a group of samples
that all succeed or all fail teaches nothing, and p (1 - p) is the variance of one that does neither.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_mopd.errors import UserError


def counts(weights: Mapping[int, float], num_tasks: int) -> dict[int, int]:
    """Tasks of each difficulty, largest remainder first: they sum to `num_tasks`, each within one of its share."""
    if not weights or min(weights.values()) < 0 or sum(weights.values()) <= 0:
        raise UserError(f"difficulty weights {dict(weights)} must be 0 or more, and one of them above 0")
    shares = {level: num_tasks * weight / sum(weights.values()) for level, weight in weights.items()}
    apportioned = {level: int(share) for level, share in shares.items()}
    by_remainder = sorted(shares, key=lambda level: (apportioned[level] - shares[level], level))
    for level in by_remainder[: num_tasks - sum(apportioned.values())]:
        apportioned[level] += 1
    return apportioned


def informative_weights(pass_rates: Mapping[int, float], floor: float = 0.02) -> dict[int, float]:
    """Weights p (1 - p), but at least `floor`, so that a difficulty that is not informative today is seen again."""
    for level, rate in pass_rates.items():
        if not 0 <= rate <= 1:
            raise UserError(f"pass rate {rate} of difficulty {level} must be between 0 and 1")
    return {level: max(floor, rate * (1 - rate)) for level, rate in pass_rates.items()}
