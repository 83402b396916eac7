"""Multi-teacher on-policy distillation: eq. 15 of Kimi K3 (arXiv 2607.24653, section 4.1.3).

    r_t = clip(sg[teacher_logprob_t - student_logprob_t], -R_max, +R_max)
    loss = -sum_t weight_t * r_t * student_logprob_t

With an outcome_weight alpha the trajectory's advantage (advantages.py) is added, as in MiMo (arXiv 2601.02780):
r_t + alpha * A, where A is not clipped.

The teacher is the one that the trajectory was routed to, scored without the effort message. A token whose teacher
log-prob is not finite is left out and counted; it stays in |y|, so leaving it out does not raise the weight of its
neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_mopd import config
from megatron_mopd.objectives.objective import TokenColumns, TokenTerms
from megatron_mopd.objectives.policy_gradient import policy_gradient


class Mopd:
    divergence = None

    def __init__(self, r_max: float | None, outcome_weight: float = 0.0, ratio: config.Ratio | None = None) -> None:
        self.r_max, self.outcome_weight, self.ratio = r_max, outcome_weight, ratio or config.Ratio()

    def __call__(self, student_logprobs_T: Tensor, columns: TokenColumns) -> TokenTerms:
        trained_T = columns.loss_mask_T & torch.isfinite(columns.teacher_logprobs_T)
        log_ratio_T = (columns.teacher_logprobs_T - student_logprobs_T).where(trained_T, 0.0)
        reward_T = log_ratio_T if self.r_max is None else log_ratio_T.clamp(-self.r_max, self.r_max)
        advantage_T = reward_T
        if self.outcome_weight:
            advantage_T = reward_T + self.outcome_weight * columns.outcome_advantage_T
        return policy_gradient(
            advantage_T,
            trained_T,
            student_logprobs_T,
            columns,
            self.ratio,
            reverse_kl_T=-log_ratio_T,
            clipped_T=reward_T != log_ratio_T,
        )
