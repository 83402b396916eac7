"""The reverse KL of whole distributions, the student's p from its teacher's q, from logits split over the vocabulary.

    full_kl   sum_v p_v log(p_v / q_v)
    topk      sum of p_v log(p_v / q_v) - p_v + q_v over the teacher's k most likely v  (eq. 4 of arXiv 2606.30406)

The linear terms keep every summand of topk at 0 or above, with its minimum where p_v = q_v: without them the sum falls
when p loses mass to the tokens that are left out. Over the whole vocabulary they add up to 0, so full_kl is topk with
k = V, and is computed as such. The gradient with respect to the logits, with a_v = log(p_v / q_v) for v in the sum and
0 for others, is

    p_v (a_v - sum_u p_u a_u)

It is exact: no sampled token is in it, and nothing is clipped.

Shape suffixes: T packed tokens, v this rank's slice of the vocabulary, k the teacher's top k, K of all ranks together.
Promises (tests/parity/test_distribution.py): value and gradient are those of float64 autograd for any number of ranks;
float32 inside (float64 stays); no rank sees logits of another but k candidates; of equal teacher logits at the end of
the top k any may be chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mopd.objectives.logprob_head import all_reduce
from megatron_mopd.objectives.objective import TokenColumns, TokenTerms


class TargetDivergence(NamedTuple):
    """Of each target, float32 and the same on every rank."""

    logprobs_T: Tensor
    entropy_T: Tensor
    grad_square_T: Tensor
    """|d divergence / d logits|^2"""
    divergence_T: Tensor

    @property
    def value_T(self) -> Tensor:
        """What the loss is made of."""
        return self.divergence_T


# From logits and teacher's logits [T, v], targets, the first column's index in the vocabulary, and the ranks; with the
# gradient [T, v] of each token's divergence with respect to its logits.
Divergence = Callable[[Tensor, Tensor, Tensor, int, dist.ProcessGroup | None], tuple[TargetDivergence, Tensor]]


class DistributionKL:
    """loss = sum_t weight_t * divergence_t over the trained tokens; `top_k` None: over the whole vocabulary. There is
    no log-ratio to bound, and no r_max."""

    def __init__(self, top_k: int | None) -> None:
        self.divergence: Divergence = partial(vocab_parallel_divergence, top_k)

    def __call__(self, student_logprobs_T: Tensor, columns: TokenColumns) -> TokenTerms:
        trained_T = columns.loss_mask_T & torch.isfinite(columns.teacher_logprobs_T)
        return TokenTerms(
            coefficient_T=columns.weight_T.where(trained_T, 0.0),
            trained_T=trained_T,
            reverse_kl_T=(student_logprobs_T - columns.teacher_logprobs_T).where(trained_T, 0.0),
            clipped_T=torch.zeros_like(trained_T),
            mismatch_T=(student_logprobs_T - columns.rollout_logprobs_T).where(trained_T, 0.0),
        )


def vocab_parallel_divergence(
    top_k: int | None,
    logits_Tv: Tensor,
    teacher_logits_Tv: Tensor,
    target_T: Tensor,
    vocab_start: int,
    group: dist.ProcessGroup | None,
) -> tuple[TargetDivergence, Tensor]:
    """The divergence at each target, what else the ranks of `group` know of it, and its gradient on these columns.

    `vocab_start` is the vocabulary index of this rank's first column; a slice may be empty. `group` is None where one
    rank holds the vocabulary.
    """
    log_p_Tv, log_q_Tv = _log_softmax([logits_Tv, teacher_logits_Tv], group)
    p_Tv = log_p_Tv.exp()
    ratio_Tv = log_p_Tv - log_q_Tv
    terms_Tv = (p_Tv * ratio_Tv).sub_(p_Tv).add_(log_q_Tv.exp())
    if top_k is not None:
        kept_Tv = _teachers_top_k(log_q_Tv, top_k, group)
        ratio_Tv, terms_Tv = ratio_Tv.where(kept_Tv, 0.0), terms_Tv.where(kept_Tv, 0.0)
    sums_4T = torch.stack(
        [
            terms_Tv.sum(-1),
            (p_Tv * ratio_Tv).sum(-1),
            -(p_Tv * log_p_Tv).sum(-1),
            _pick(log_p_Tv, target_T - vocab_start),
        ]
    )
    all_reduce(sums_4T, dist.ReduceOp.SUM, group)
    divergence_T, mean_ratio_T, entropy_T, logprobs_T = sums_4T
    grad_Tv = ratio_Tv.sub_(mean_ratio_T[:, None]).mul_(p_Tv)
    grad_square_T = grad_Tv.square().sum(-1)
    all_reduce(grad_square_T, dist.ReduceOp.SUM, group)
    return TargetDivergence(logprobs_T, entropy_T, grad_square_T, divergence_T), grad_Tv


def _log_softmax(logits: list[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Of each [T, v], over the whole vocabulary."""
    logits = [x_Tv.to(torch.promote_types(x_Tv.dtype, torch.float32)) for x_Tv in logits]
    maxima = [x_Tv.amax(-1) if x_Tv.shape[-1] else x_Tv.new_full(x_Tv.shape[:1], -torch.inf) for x_Tv in logits]
    max_nT = torch.stack(maxima)
    all_reduce(max_nT, dist.ReduceOp.MAX, group)
    shifted = [x_Tv - max_T[:, None] for x_Tv, max_T in zip(logits, max_nT, strict=True)]
    sum_nT = torch.stack([x_Tv.exp().sum(-1) for x_Tv in shifted])
    all_reduce(sum_nT, dist.ReduceOp.SUM, group)
    return [x_Tv.sub_(log_sum_T[:, None]) for x_Tv, log_sum_T in zip(shifted, sum_nT.log(), strict=True)]


def _pick(x_Tv: Tensor, local_T: Tensor) -> Tensor:
    """The columns of the targets, 0 where another rank has it."""
    v = x_Tv.shape[-1]
    if v == 0:
        return x_Tv.new_zeros(len(x_Tv))
    owned_T = (local_T >= 0) & (local_T < v)
    return x_Tv.gather(-1, local_T.where(owned_T, 0)[:, None])[:, 0].where(owned_T, 0.0)


def _teachers_top_k(log_q_Tv: Tensor, top_k: int, group: dist.ProcessGroup | None) -> Tensor:
    """[T, v] bool: which of this rank's columns are among the k largest of all."""
    T, v = log_q_Tv.shape
    own = min(top_k, v)
    best, column = log_q_Tv.topk(own)
    best_Tk = log_q_Tv.new_full((T, top_k), -torch.inf)
    best_Tk[:, :own] = best
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    parts = [best_Tk]
    if size > 1:
        parts = [torch.empty_like(best_Tk) for _ in range(size)]
        dist.all_gather(parts, best_Tk, group=group)
    best_TK = torch.cat(parts, dim=-1)
    chosen_TK = torch.zeros_like(best_TK, dtype=torch.bool).scatter_(-1, best_TK.topk(top_k).indices, True)
    mine = chosen_TK[:, rank * top_k : rank * top_k + own]
    return torch.zeros_like(log_q_Tv, dtype=torch.bool).scatter_(-1, column, mine)
