"""Ways from hidden states and an output layer to log-probs and the gradient of a policy loss, for tools/bench_head.py.

Each takes a `Problem` and returns log-probs [T] and the gradients of hidden states [T, D] and of this rank's weight
[v, D]. Coefficients are clipped differences from the teacher's log-probs, which are known only with the student's.
These need torch alone; Megatron-Core's are in megatron_methods.py.

Shape suffixes: T tokens, D width, v this rank's part of the vocabulary, c a chunk of tokens, b a part of v.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mopd.mcore.one_pass import one_pass
from megatron_mopd.mcore.products import add_product, product
from megatron_mopd.mcore.token_chunks import TokenChunks
from megatron_mopd.mcore.vocab_slice import VocabSlice
from megatron_mopd.objectives.logprob_head import in_cache, owned

SPLIT = 6144
"""Columns that verl's kernel takes at a time."""


class Problem(NamedTuple):
    hidden_TD: Tensor
    weight_vD: Tensor
    target_T: Tensor
    teacher_T: Tensor
    """Log-probs of the targets."""
    vocab_start: int
    group: dist.ProcessGroup
    chunk: int
    block: int

    def coefficients(self, logprobs_c: Tensor, index_c: Tensor) -> Tensor:
        return (logprobs_c - self.teacher_T[index_c]).clamp(-5, 5).float() / len(self.target_T)

    def all_coefficients(self, logprobs_T: Tensor) -> Tensor:
        return self.coefficients(logprobs_T, torch.arange(len(logprobs_T), device=logprobs_T.device))

    @property
    def layer(self) -> VocabSlice:
        return VocabSlice(self.weight_vD, self.vocab_start, 1.0, self.group, self.block)


Answer = tuple[Tensor, Tensor | None, Tensor | None]


def floor(p: Problem) -> Answer:
    """The three products of every chunk in the model's dtype, and nothing else. Their results are allocated anew, as
    every method allocates its own; the gradient of the hidden states is not kept."""
    grad_weight_vD = torch.empty_like(p.weight_vD)
    logits_cv = p.weight_vD.new_empty(p.chunk, len(p.weight_vD))
    grad_cD = p.weight_vD.new_empty(p.chunk, p.weight_vD.shape[1])
    for hidden_cD in p.hidden_TD.split(p.chunk):
        c = len(hidden_cD)
        torch.mm(hidden_cD, p.weight_vD.t(), out=logits_cv[:c])
        torch.mm(logits_cv[:c], p.weight_vD, out=grad_cD[:c])
        torch.mm(logits_cv[:c].t(), hidden_cD, out=grad_weight_vD)
    return torch.zeros_like(p.teacher_T), None, None


def ours(p: Problem) -> Answer:
    """One pass: three products with float32 sums."""
    tokens = TokenChunks(p.hidden_TD, p.chunk, p.group)
    scored, _, gradients = one_pass(p.layer, tokens, p.target_T, p.coefficients)
    return scored.logprobs_T, gradients.hidden_tD, gradients.weight_vD


def recompute(p: Problem) -> Answer:
    """As ours with a fourth product: log-probs in the forward pass, logits once more for the gradients."""
    p.layer.score(p.hidden_TD, p.target_T, p.chunk)
    return ours(p)


def recompute_max(p: Problem) -> Answer:
    """Four products as verl's linear_cross_entropy: a part of the vocabulary at a time, float32 logits, a softmax that
    refers to the largest; in backward the logits again. Elementwise in torch's operations."""
    v = len(p.weight_vD)
    parts = [slice(start, min(start + SPLIT, v)) for start in range(0, v, SPLIT)]
    logits_Tb = torch.empty(len(p.hidden_TD), min(SPLIT, v), device=p.weight_vD.device)
    logprobs_T, log_total_T = _online_logprobs(p, parts, logits_Tb)
    coefficient_T = p.all_coefficients(logprobs_T)
    grad_TD, grad_vD = torch.zeros_like(p.hidden_TD).float(), torch.empty_like(p.weight_vD).float()
    grad_Tb = torch.empty_like(logits_Tb, dtype=p.weight_vD.dtype)
    for columns in parts:
        z_Tb, d_Tb = (x[:, : columns.stop - columns.start] for x in (logits_Tb, grad_Tb))
        product(p.hidden_TD, p.weight_vD[columns].t(), z_Tb)
        column_T = p.target_T - p.vocab_start - columns.start
        for rows in in_cache(z_Tb):
            softmax_rb = z_Tb[rows].sub_(log_total_T[rows, None]).exp_().mul_(-coefficient_T[rows, None])
            d_Tb[rows] = _add_owned(softmax_rb, column_T[rows], coefficient_T[rows])
        add_product(d_Tb, p.weight_vD[columns], grad_TD)
        product(d_Tb.t(), p.hidden_TD, grad_vD[columns])
    if p.group.size() > 1:
        dist.all_reduce(grad_TD, group=p.group)
    return logprobs_T, grad_TD, grad_vD


def _online_logprobs(p: Problem, parts: list[slice], logits_Tb: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs, and the logarithms of what the exponentials add up to."""
    max_T = torch.full_like(p.teacher_T, -torch.inf)
    sum_T, picked_T = torch.zeros_like(p.teacher_T), torch.zeros_like(p.teacher_T)
    for columns in parts:
        z_Tb = logits_Tb[:, : columns.stop - columns.start]
        product(p.hidden_TD, p.weight_vD[columns].t(), z_Tb)
        picked_T += _picked(z_Tb, p.target_T - p.vocab_start - columns.start)
        for rows in in_cache(z_Tb):
            new_r = torch.maximum(max_T[rows], z_Tb[rows].amax(-1))
            sum_T[rows] *= (max_T[rows] - new_r).exp()
            sum_T[rows] += z_Tb[rows].sub_(new_r[:, None]).exp_().sum(-1)
            max_T[rows] = new_r
    if p.group.size() > 1:
        own_max_T = max_T.clone()
        dist.all_reduce(max_T, dist.ReduceOp.MAX, group=p.group)
        both_2T = torch.stack([sum_T * (own_max_T - max_T).exp(), picked_T])
        dist.all_reduce(both_2T, group=p.group)
        sum_T, picked_T = both_2T
    log_total_T = max_T + sum_T.log()
    return picked_T - log_total_T, log_total_T


def chunked_logits(p: Problem) -> Answer:
    """All logits in the model's dtype, a float32 log-softmax of a chunk at a time, again in backward."""
    return by_autograd(p, lambda logits_T1v: _ChunkedLogprobs.apply(logits_T1v[:, 0], p))


def by_autograd(p: Problem, logprobs_of: Callable[[Tensor], Tensor]) -> Answer:
    """From all logits [T, 1, v] in the model's dtype."""
    hidden_TD, weight_vD = p.hidden_TD.detach().requires_grad_(), p.weight_vD.detach().requires_grad_()
    logprobs_T = logprobs_of((hidden_TD @ weight_vD.t())[:, None])
    (p.all_coefficients(logprobs_T.detach()) * logprobs_T).sum().backward()
    assert hidden_TD.grad is not None
    if p.group.size() > 1:
        dist.all_reduce(hidden_TD.grad, group=p.group)
    return logprobs_T.detach(), hidden_TD.grad, weight_vD.grad


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_Tv: Tensor, p: Problem) -> Tensor:
        ctx.save_for_backward(logits_Tv)
        ctx.problem = p
        parts = [_log_softmax(logits_cv, p.group) for logits_cv in logits_Tv.split(p.chunk)]
        columns = (p.target_T - p.vocab_start).split(p.chunk)
        logprobs_T = torch.cat([_picked(x_cv, column_c) for x_cv, column_c in zip(parts, columns, strict=True)])
        if p.group.size() > 1:
            dist.all_reduce(logprobs_T, group=p.group)
        return logprobs_T

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None]:
        (logits_Tv,), p = ctx.saved_tensors, ctx.problem
        grad_Tv = torch.empty_like(logits_Tv)
        for rows in (slice(s, s + p.chunk) for s in range(0, len(logits_Tv), p.chunk)):
            softmax_cv = _log_softmax(logits_Tv[rows], p.group).exp_().mul_(-grad_T[rows, None])
            column_c = p.target_T[rows] - p.vocab_start
            grad_Tv[rows] = _add_owned(softmax_cv, column_c, grad_T[rows])
        return grad_Tv, None


def _log_softmax(logits_cv: Tensor, group: dist.ProcessGroup) -> Tensor:
    logits_cv = logits_cv.float()
    max_c1 = logits_cv.amax(-1, keepdim=True)
    if group.size() > 1:
        dist.all_reduce(max_c1, dist.ReduceOp.MAX, group=group)
    logits_cv = logits_cv - max_c1
    sum_c1 = logits_cv.exp().sum(-1, keepdim=True)
    if group.size() > 1:
        dist.all_reduce(sum_c1, group=group)
    return logits_cv.sub_(sum_c1.log())


def _picked(x_cv: Tensor, column_c: Tensor) -> Tensor:
    is_owned_c, column_c = owned(column_c, x_cv.shape[1])
    return x_cv.gather(1, column_c[:, None])[:, 0].where(is_owned_c, 0.0)


def _add_owned(x_cv: Tensor, column_c: Tensor, amount_c: Tensor) -> Tensor:
    is_owned_c, column_c = owned(column_c, x_cv.shape[1])
    return x_cv.scatter_add_(1, column_c[:, None], amount_c.where(is_owned_c, 0.0)[:, None])


METHODS: dict[str, Callable[[Problem], Answer]] = {
    f.__name__: f for f in (floor, ours, recompute, recompute_max, chunked_logits)
}
