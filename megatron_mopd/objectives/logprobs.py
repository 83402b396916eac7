"""Log-probability of a token from vocabulary-parallel logits, the entropy of its distribution, and the size of its
gradient.

No rank holds a full row of logits: each has a contiguous slice of the columns, and slices may differ in width (padded
columns are left out by the caller).

    log p(y) = z_y - log sum_u exp(z_u)         entropy = log sum_u exp(z_u) - sum_u p_u z_u

The gradient of log p(y) with respect to the logits is onehot(y) - p, whose square is (1 - p_y)^2 + sum_{u != y} p_u^2.
In this form, and not as 1 - 2 p_y + sum_u p_u^2, nothing cancels for a token that is nearly certain.

Shape suffixes: T packed tokens, v this rank's slice of the vocabulary.
Promises (tests/parity/test_logprobs.py): equal to log_softmax for any number of ranks, in value and gradient; float32
inside; two all-reduces forward (a maximum, then four sums in one) and none backward; one float32 [T, v] buffer is
kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class TargetLogprobs(NamedTuple):
    """Of each target, float32 and the same on every rank. Gradients flow from the log-probs alone."""

    logprobs_T: Tensor
    entropy_T: Tensor
    grad_square_T: Tensor
    """|d log p(target) / d logits|^2, between 0 and 2."""

    @property
    def value_T(self) -> Tensor:
        """What the loss is made of."""
        return self.logprobs_T


def vocab_parallel_logprobs(
    logits_Tv: Tensor, target_T: Tensor, vocab_start: int, group: dist.ProcessGroup | None
) -> TargetLogprobs:
    """What the ranks of `group` know together of each target.

    `vocab_start` is the vocabulary index of this rank's first column; a slice may be empty. `group` is None where one
    rank holds the vocabulary. A target outside the vocabulary has no owner, and the caller must not pass one.
    """
    return TargetLogprobs(*_VocabParallelLogprobs.apply(logits_Tv, target_T, vocab_start, group))


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_Tv: Tensor, target_T: Tensor, vocab_start: int, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        v = logits_Tv.shape[-1]
        logits_Tv = logits_Tv.float()
        max_T = logits_Tv.amax(dim=-1) if v else logits_Tv.new_full(target_T.shape, -torch.inf)
        all_reduce(max_T, dist.ReduceOp.MAX, group)
        shifted_Tv = logits_Tv - max_T[:, None]

        local_T = target_T - vocab_start
        owned_T = (local_T >= 0) & (local_T < v)
        local_T = local_T.where(owned_T, 0)
        exp_Tv = shifted_Tv.exp()
        picked_T = shifted_Tv.gather(-1, local_T[:, None]).squeeze(-1) if v else torch.zeros_like(max_T)
        sums_4T = torch.stack(
            [
                picked_T.where(owned_T, 0.0),
                exp_Tv.sum(-1),
                torch.linalg.vecdot(exp_Tv, shifted_Tv),
                _square_without(exp_Tv, local_T, owned_T),
            ]
        )
        all_reduce(sums_4T, dist.ReduceOp.SUM, group)

        target_logit_T, sum_exp_T, weighted_T, others_T = sums_4T
        log_sum_T = sum_exp_T.log()
        logprobs_T = target_logit_T - log_sum_T
        ctx.save_for_backward(exp_Tv.div_(sum_exp_T[:, None]), local_T, owned_T)
        entropy_T = log_sum_T - weighted_T / sum_exp_T
        grad_square_T = logprobs_T.expm1().square() + others_T / sum_exp_T.square()
        ctx.mark_non_differentiable(entropy_T, grad_square_T)
        return logprobs_T, entropy_T, grad_square_T

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None]:
        softmax_Tv, local_T, owned_T = ctx.saved_tensors
        grad_Tv = softmax_Tv * -grad_T[:, None]
        if grad_Tv.shape[-1]:
            grad_Tv.scatter_add_(-1, local_T[:, None], grad_T.where(owned_T, 0.0)[:, None])
        return grad_Tv, None, None, None


def _square_without(exp_Tv: Tensor, local_T: Tensor, owned_T: Tensor) -> Tensor:
    """sum_v exp_v^2 over this rank's columns but the target's, [T], without another [T, v] buffer.

    The target's entry is 0 meanwhile, and then what it was.
    """
    if exp_Tv.shape[-1] == 0:
        return exp_Tv.new_zeros(len(exp_Tv))
    target_T1 = exp_Tv.gather(-1, local_T[:, None])
    exp_Tv.scatter_(-1, local_T[:, None], target_T1.where(~owned_T[:, None], 0.0))
    square_T = torch.linalg.vector_norm(exp_Tv, dim=-1).square()
    exp_Tv.scatter_(-1, local_T[:, None], target_T1)
    return square_T


def all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> None:
    """In place; `group` is None where one rank holds the vocabulary."""
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)
