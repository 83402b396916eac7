"""Reinforcement learning on outcomes: the objective that makes the teachers.

    advantage_t = A + beta * sg[reference_logprob_t - student_logprob_t]

A is the trajectory's advantage in its group (advantages.py). The reference policy, if there is one, is the teacher of
the cell: its log-probs come over the same lanes. Its term is that of mopd, times beta: the gradient of the KL per token
to the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_mopd import config
from megatron_mopd.objectives.objective import TokenColumns, TokenTerms
from megatron_mopd.objectives.policy_gradient import policy_gradient


class Grpo:
    divergence = None

    def __init__(self, beta: float, ratio: config.Ratio) -> None:
        self.beta, self.ratio = beta, ratio

    def __call__(self, student_logprobs_T: Tensor, columns: TokenColumns) -> TokenTerms:
        trained_T, reverse_kl_T, advantage_T = columns.loss_mask_T, None, columns.outcome_advantage_T
        if self.beta:
            trained_T = trained_T & torch.isfinite(columns.teacher_logprobs_T)
            reverse_kl_T = (student_logprobs_T - columns.teacher_logprobs_T).where(trained_T, 0.0)
            advantage_T = advantage_T - self.beta * reverse_kl_T
        return policy_gradient(advantage_T, trained_T, student_logprobs_T, columns, self.ratio, reverse_kl_T)
