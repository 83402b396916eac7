"""Log-probs of given tokens and the gradient of a loss made of them, from logits of which each block is seen once.

The softmax refers to the target's logit instead of the largest. With z_y known beforehand, over all v other than y,

    E_v = exp(z_v - z_y)        S = sum E_v        U = sum E_v (z_v - z_y)        Q = sum E_v^2

    log p_y = -log1p(S)         1 - p_y = S / (1 + S)         entropy = log1p(S) - U / (1 + S)
    |d log p_y / dz|^2 = (S^2 + Q) / (1 + S)^2

and a loss of c log p_y has the gradient

    a E_v   for v other than y,    -a S   for y,    with    a = -c / (1 + S)

There is no pass for a maximum, E is the gradient but for a factor per row, and nothing cancels for a token that is
nearly certain. Where log p_y is below about -LIMIT, E may be cut off: the row `is_cut`, and is done again with the
largest logit m in the place of z_y. With o = z_y - m, which is 0 above, the sums are of exp(z_v - m), 1 + S becomes
exp(o) + S, log p_y = o - log(exp(o) + S), and U has another o exp(o).

No rank holds a full row: each has a contiguous slice of the columns, without the padding of the vocabulary, and adds up
its own part of S, U and Q. Logits are float32; they are divided by the temperature here, and gradients are with respect
to what they were before, except for |d log p_y / dz|^2.

Shape suffixes: c tokens of a chunk, b columns of a block, T packed tokens.
Promises (tests/parity/test_logprob_head.py): equal to log_softmax in float64, in value and gradient, for any number of
ranks and chunks and for log-probs from -0 to -300.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

LIMIT = 32.0
"""Of z_v - z_y. Float32 holds e^32 squared and summed over any vocabulary, and a divided by it."""

_CUT = math.exp(LIMIT) * (1 - 1e-5)
"""S is no less where anything was cut off."""


_NEVER = -1e30
"""A logit whose exponential is 0, and times its exponential as well."""


class TargetLogprobs(NamedTuple):
    """Of each target, float32 and the same on every rank."""

    logprobs_T: Tensor
    entropy_T: Tensor
    grad_square_T: Tensor
    """|d log p(target) / d logits|^2, between 0 and 2."""

    @property
    def value_T(self) -> Tensor:
        """What the loss is made of."""
        return self.logprobs_T


class Targets(NamedTuple):
    """What the rows of logits are compared with."""

    column_T: Tensor
    """Of the target, from the first column at hand on; outside the columns where another rank has it."""
    reference_T: Tensor
    """In logits divided by the temperature: the target's, or the largest."""
    offset_T: Tensor
    """The target's logit minus the reference, at most 0."""

    def at(self, index: Tensor | slice) -> Targets:
        return Targets(self.column_T[index], self.reference_T[index], self.offset_T[index])

    def referring_to(self, largest_T: Tensor) -> Targets:
        """With the largest logits as the reference, where that of the target was."""
        return self._replace(reference_T=largest_T, offset_T=self.reference_T - largest_T)


def owned(column_T: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Which of them exist, and an existing column for all."""
    is_owned_T = (column_T >= 0) & (column_T < num_columns)
    return is_owned_T, column_T.where(is_owned_T, 0)


def add_exponentials(
    logits_cb: Tensor,
    reference_c: Tensor,
    column_c: Tensor,
    temperature: float,
    sums_3c: Tensor,
    out_cb: Tensor | None = None,
) -> None:
    """Add S, U, Q of a block to `sums_3c`, and write E, 0 for targets, into `out_cb`. Overwrites the logits."""
    is_owned_c1, column_c1 = (x_c[:, None] for x_c in owned(column_c, logits_cb.shape[1]))
    logits_cb.scatter_(1, column_c1, logits_cb.gather(1, column_c1).masked_fill_(is_owned_c1, _NEVER))
    buffer = torch.empty_like(logits_cb[: _rows_at_once(logits_cb)])
    for rows in in_cache(logits_cb):
        difference_cb = logits_cb[rows]
        if temperature != 1.0:
            difference_cb.div_(temperature)
        difference_cb.sub_(reference_c[rows, None]).clamp_(max=LIMIT)
        e_cb = torch.exp(difference_cb, out=buffer[: len(difference_cb)])
        if out_cb is not None:
            out_cb[rows] = e_cb
        q_c = torch.linalg.vector_norm(e_cb, dim=-1).square_()
        sums_3c[:, rows] += torch.stack([e_cb.sum(-1), difference_cb.mul_(e_cb).sum(-1), q_c])


def in_cache(x: Tensor) -> Iterator[slice]:
    """The rows of a matrix that are worked on at a time, so that operations one after the other find them in the cache
    of a CPU, and what they make does not have the size of all."""
    num_rows, size = len(x), _rows_at_once(x)
    return (slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size))


def _rows_at_once(x: Tensor) -> int:
    return max(1, (1 << 24 if x.is_cuda else 1 << 17) // max(1, x.shape[1]))


def is_cut(sums_3T: Tensor) -> Tensor:
    """Rows whose sums cannot be used, not-a-number included."""
    return ~(sums_3T[0] < _CUT)


def target_logprobs(sums_3T: Tensor, offset_T: Tensor) -> TargetLogprobs:
    """From the sums over the whole vocabulary."""
    s_T, u_T, q_T = sums_3T
    total_T = s_T + offset_T.exp()
    log_total_T = torch.log1p(s_T + offset_T.expm1())
    return TargetLogprobs(
        logprobs_T=offset_T - log_total_T,
        entropy_T=log_total_T - (u_T + offset_T.exp() * offset_T) / total_T,
        grad_square_T=(s_T / total_T).square() + q_T / total_T.square(),
    )


def gradient_factors(sums_3c: Tensor, offset_c: Tensor, coefficient_c: Tensor) -> tuple[Tensor, Tensor]:
    """a [c] and the gradient of the target's logit [c], of sum_c coefficient_c * log p_c."""
    a_c = -coefficient_c / (sums_3c[0] + offset_c.exp())
    return a_c, -a_c * sums_3c[0]


def all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> None:
    """In place; `group` is None where one rank holds the vocabulary."""
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)
