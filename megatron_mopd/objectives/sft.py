"""Supervised fine-tuning: loss = -sum_t weight_t * logprob_t over the demonstrated tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_mopd.objectives.objective import TokenColumns, TokenTerms


class Sft:
    divergence = None

    def __call__(self, student_logprobs_T: Tensor, columns: TokenColumns) -> TokenTerms:
        zero_T = torch.zeros_like(student_logprobs_T)
        return TokenTerms(
            coefficient_T=-columns.weight_T.where(columns.loss_mask_T, 0.0),
            trained_T=columns.loss_mask_T,
            reverse_kl_T=zero_T,
            clipped_T=torch.zeros_like(columns.loss_mask_T),
            mismatch_T=zero_T,
        )
