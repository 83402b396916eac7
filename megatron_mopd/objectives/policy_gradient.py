"""The policy gradient that mopd and grpo share. They differ in the advantage of a token, and in nothing else:

    mopd    clip(teacher - student) + outcome_weight * A
    grpo    A - beta * (student - reference)

    loss = -sum_t weight_t * ratio weight_t * advantage_t * student_logprob_t

Shape suffix: T packed tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_mopd import config
from megatron_mopd.objectives.objective import TokenColumns, TokenTerms
from megatron_mopd.objectives.ratio import ratio_terms


def policy_gradient(
    advantage_T: Tensor,
    trained_T: Tensor,
    student_logprobs_T: Tensor,
    columns: TokenColumns,
    ratio: config.Ratio,
    reverse_kl_T: Tensor | None = None,
    clipped_T: Tensor | None = None,
) -> TokenTerms:
    """What `advantage_T` means for each token. `reverse_kl_T` and `clipped_T` are for the record alone, zero without a
    teacher."""
    coefficient_T = -advantage_T * columns.weight_T
    terms = ratio_terms(ratio, student_logprobs_T, columns.rollout_logprobs_T, advantage_T)
    if terms is not None:
        coefficient_T = coefficient_T * terms.weight_T
    return TokenTerms(
        coefficient_T=coefficient_T.where(trained_T, 0.0),
        trained_T=trained_T,
        reverse_kl_T=torch.zeros_like(advantage_T) if reverse_kl_T is None else reverse_kl_T,
        clipped_T=torch.zeros_like(trained_T) if clipped_T is None else clipped_T,
        mismatch_T=(student_logprobs_T - columns.rollout_logprobs_T).where(trained_T, 0.0),
        ratio=terms,
    )
