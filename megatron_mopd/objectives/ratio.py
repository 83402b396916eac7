"""What the ratio exp(student - rollout log-prob) of a token does to its gradient: three devices, each with a switch of
its own (config.Ratio) and a metric of its own.

    clip      PPO: no gradient once the ratio has left [1 - clip_low, 1 + clip_high] on the side to which the advantage
              pushes it. That is the gradient of min(ratio * A, clip(ratio) * A)             (arXiv 1707.06347)
    mask      IcePop, MiMo: no gradient outside [mask_low, mask_high]                        (arXiv 2601.02780)
    truncate  TIS: as a weight the ratio is kept within [truncate_low, truncate_high]

With any of them on, the gradient of a token is weighted by its ratio, which corrects for having been sampled by
another policy: older weights, or an engine that computes otherwise. With none, nothing is weighted, and nothing
computed. Promises: tests/unit/test_ratio.py.

Shape suffix: T packed tokens.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from megatron_mopd import config


class RatioTerms(NamedTuple):
    """The weight of each token, and which device has touched it."""

    weight_T: Tensor
    clipped_T: Tensor
    masked_T: Tensor
    truncated_T: Tensor


def ratio_terms(
    options: config.Ratio, student_logprobs_T: Tensor, rollout_logprobs_T: Tensor, advantage_T: Tensor
) -> RatioTerms | None:
    """None where every device is off. The caller leaves out what it does not train on."""
    if not options.is_on:
        return None
    ratio_T = (student_logprobs_T - rollout_logprobs_T).exp()
    above, below = 1 + _bound(options.clip_high), 1 - _bound(options.clip_low)
    clipped_T = ((advantage_T > 0) & (ratio_T > above)) | ((advantage_T < 0) & (ratio_T < below))
    masked_T = (ratio_T < (options.mask_low or 0.0)) | (ratio_T > _bound(options.mask_high))
    weight_T = ratio_T.clamp(options.truncate_low or 0.0, _bound(options.truncate_high))
    return RatioTerms(
        weight_T=weight_T.where(~(clipped_T | masked_T), 0.0),
        clipped_T=clipped_T,
        masked_T=masked_T,
        truncated_T=weight_T != ratio_T,
    )


def _bound(distance: float | None) -> float:
    return math.inf if distance is None else distance
