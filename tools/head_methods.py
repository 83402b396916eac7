"""Ways from hidden states and an output layer to log-probs and the gradient of a policy loss, for tools/bench_head.py.

Each takes a `Problem` and returns log-probs [T] and the gradients of hidden states [T, D] and of this rank's weight
[v, D]. Coefficients are clipped differences from the teacher's log-probs, which are known only with the student's.

Shape suffixes: T tokens, D width, v this rank's part of the vocabulary, c a chunk of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mopd.mcore import device  # noqa: F401
from megatron_mopd.mcore.one_pass import one_pass
from megatron_mopd.mcore.token_chunks import TokenChunks
from megatron_mopd.mcore.vocab_slice import VocabSlice

# isort: split
from megatron.core import parallel_state
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy


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
    """The three products of every chunk in the model's dtype, and nothing else."""
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


def mcore(p: Problem) -> Answer:
    """Megatron-Core's vocab_parallel_cross_entropy on logits in the model's dtype."""
    return _by_autograd(p, lambda logits_T1v: -vocab_parallel_cross_entropy(logits_T1v, p.target_T[:, None])[:, 0])


def mcore_fused(p: Problem) -> Answer:
    """Megatron-Core's fused_vocab_parallel_cross_entropy (not compiled on a CPU)."""
    group = parallel_state.get_tensor_model_parallel_group()
    return _by_autograd(
        p, lambda logits_T1v: -fused_vocab_parallel_cross_entropy(logits_T1v, p.target_T[:, None], group)[:, 0]
    )


def chunked_logits(p: Problem) -> Answer:
    """All logits in the model's dtype, a float32 log-softmax of a chunk at a time, again in backward."""
    return _by_autograd(p, lambda logits_T1v: _ChunkedLogprobs.apply(logits_T1v[:, 0], p))


def _by_autograd(p: Problem, logprobs_of: Callable[[Tensor], Tensor]) -> Answer:
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
            is_owned_c = (column_c >= 0) & (column_c < logits_Tv.shape[1])
            softmax_cv.scatter_add_(
                1, column_c.where(is_owned_c, 0)[:, None], grad_T[rows].where(is_owned_c, 0.0)[:, None]
            )
            grad_Tv[rows] = softmax_cv
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
    is_owned_c = (column_c >= 0) & (column_c < x_cv.shape[1])
    return x_cv.gather(1, column_c.where(is_owned_c, 0)[:, None])[:, 0].where(is_owned_c, 0.0)


METHODS: dict[str, Callable[[Problem], Answer]] = {
    f.__name__: f for f in (floor, ours, recompute, mcore, mcore_fused, chunked_logits)
}
