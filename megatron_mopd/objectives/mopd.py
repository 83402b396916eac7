"""Multi-teacher on-policy distillation: eq. 15 of Kimi K3 (arXiv 2607.24653, section 4.1.3).

    r_t = clip(sg[teacher_logprob_t - student_logprob_t], -R_max, +R_max)
    loss = -sum_t weight_t * r_t * student_logprob_t

The teacher is the one that the trajectory was routed to, scored without the effort message. A token whose teacher
log-prob is not finite is left out and counted; it stays in |y|, so leaving it out does not raise the weight of its
neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_mopd.objectives.objective import TokenColumns, TokenTerms


class Mopd:
    divergence = None

    def __init__(self, r_max: float | None) -> None:
        self.r_max = r_max

    def __call__(self, student_logprobs_T: Tensor, columns: TokenColumns) -> TokenTerms:
        trained_T = columns.loss_mask_T & torch.isfinite(columns.teacher_logprobs_T)
        advantage_T = (columns.teacher_logprobs_T - student_logprobs_T).where(trained_T, 0.0)
        reward_T = advantage_T if self.r_max is None else advantage_T.clamp(-self.r_max, self.r_max)
        return TokenTerms(
            coefficient_T=-reward_T * columns.weight_T,
            trained_T=trained_T,
            reverse_kl_T=-advantage_T,
            clipped_T=reward_T != advantage_T,
            mismatch_T=(student_logprobs_T - columns.rollout_logprobs_T).where(trained_T, 0.0),
        )
