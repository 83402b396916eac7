"""Log-probs of the tokens of a micro-batch and the gradient of a loss made of them, in one pass over the logits.

Of each chunk of tokens, on every tensor-parallel rank:

    logits, block by block of the vocabulary, become exponentials E and their sums      GEMM 1
    the sums go to all ranks; meanwhile E W                                             GEMM 2
    log-probs, the objective's coefficients, and with them the hidden states' gradient
    this goes to all ranks; meanwhile E^T (a H) is added to the weight's gradient       GEMM 3

When the forward pass ends the gradients are there. Nothing is computed twice, and every collective of a chunk has a
GEMM behind which it may hide, with one E at a time. E has the model's dtype. It is the one tensor of the size of a
chunk times the vocabulary, and there is none of the micro-batch times the vocabulary.

Rows of very small probability, which are cut off in the first pass (objectives/logprob_head.py), have their chunks done
once more, with the largest logit as the reference.

Promises (tests/parity/test_logprob_head.py, tests/distributed/test_head.py): value and gradient are those of float64
autograd; neither the size of a chunk nor the number of ranks changes them beyond rounding. Products, collectives and
memory are those said here (tests/parity/test_logprob_head_cost.py).

Shape suffixes: T packed tokens, t this rank's slice of them under sequence parallelism, c those of a chunk, D width, v
this rank's vocabulary without padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mopd.mcore.products import add_product, product
from megatron_mopd.mcore.token_chunks import Chunk, TokenChunks
from megatron_mopd.mcore.vocab_slice import VocabSlice
from megatron_mopd.objectives.logprob_head import (
    TargetLogprobs,
    Targets,
    gradient_factors,
    in_cache,
    is_cut,
    owned,
    target_logprobs,
)

# The objective's coefficients, from the log-probs of some tokens and their places among the T.
Coefficients = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Gradients:
    """Of a loss, float32: with respect to the hidden states of this rank's tokens, added up over the ranks, and to its
    rows of the weight (None: of a frozen one)."""

    hidden_tD: Tensor
    weight_vD: Tensor | None


@torch.no_grad()
def one_pass(
    layer: VocabSlice, tokens: TokenChunks, target_T: Tensor, coefficients: Coefficients, is_frozen: bool = False
) -> tuple[TargetLogprobs, Tensor, Gradients]:
    """Log-probs of all T, their coefficients [T], and the gradients of sum_T coefficient * log-prob.

    `coefficients` is asked chunk by chunk, and again where rows are done again. A frozen weight gets no gradient, and
    costs no third product.
    """
    work = _Pass(layer, tokens, layer.targets(tokens, target_T), coefficients, is_frozen)
    work.form(tokens.slices, torch.ones_like(target_T, dtype=torch.bool))
    if (again_T := is_cut(work.sums_3T)).any():
        work.form_again(again_T)
    scored = target_logprobs(work.sums_3T, work.targets.offset_T)
    return scored, work.coefficient_T, work.gradients


class _Pass:
    def __init__(
        self,
        layer: VocabSlice,
        tokens: TokenChunks,
        targets: Targets,
        coefficients: Coefficients,
        is_frozen: bool,
    ) -> None:
        self.layer, self.tokens, self.targets, self.coefficients = layer, tokens, targets, coefficients
        self.coefficient_T = torch.zeros_like(targets.offset_T)
        self.sums_3T = self.coefficient_T.new_zeros(3, tokens.num_tokens)
        self.gradients = Gradients(
            self.coefficient_T.new_empty(tokens.hidden_tD.shape),
            None if is_frozen else self.coefficient_T.new_empty(layer.weight_vD.shape),
        )
        self._is_first = True
        """Nothing is in the weight's gradient: the first product is written, those after it are added."""

    def form(self, slices: list[slice], only_T: Tensor) -> None:
        """Of the chunks at `slices`, what comes from the tokens `only_T`."""
        size = max((self.tokens.parts * (own.stop - own.start) for own in slices), default=0)
        e_cv = self.layer.weight_vD.new_empty(size, len(self.layer.weight_vD))
        for part in self.tokens.chunks(slices):
            self._form_chunk(part, self.targets.at(part.index_c), only_T[part.index_c], e_cv[: len(part.index_c)])
        self.tokens.finish()
        if self._is_first and self.gradients.weight_vD is not None:
            self.gradients.weight_vD.zero_()  # there were no tokens

    def form_again(self, again_T: Tensor) -> None:
        """The chunks that have such tokens, from which nothing has come yet."""
        slices = [own for own in self.tokens.slices if again_T[self.tokens.index(own)].any()]
        for part in self.tokens.chunks(slices):
            few = self.targets.at(part.index_c).referring_to(self.layer.largest(part.hidden_cD, len(part.hidden_cD)))
            is_again_c = again_T[part.index_c]
            for all_T, few_c in zip(self.targets, few, strict=True):
                all_T[part.index_c] = few_c.where(is_again_c, all_T[part.index_c])
        before_tD = self.gradients.hidden_tD
        self.gradients.hidden_tD = torch.zeros_like(before_tD)
        self.form(slices, again_T)
        self.gradients.hidden_tD += before_tD

    def _form_chunk(self, part: Chunk, targets: Targets, only_c: Tensor, e_cv: Tensor) -> None:
        grad_cD = self.tokens.gradient(self.gradients.hidden_tD, part.own)
        sums_3c = self.layer.sums(part.hidden_cD, targets, e_cv)
        group = self.layer.group
        summing = None if group is None else dist.all_reduce(sums_3c, group=group, async_op=True)
        product(e_cv, self.layer.weight_vD, grad_cD)
        if summing is not None:
            summing.wait()
        coefficient_c = self._coefficients(part, targets, only_c, sums_3c)
        a_c, of_target_c = gradient_factors(sums_3c, targets.offset_T, coefficient_c / self.layer.temperature)
        is_owned_c, column_c = owned(targets.column_T, len(self.layer.weight_vD))
        of_target_c = of_target_c.where(is_owned_c, 0.0)
        self._finish_hidden(part, grad_cD, a_c, of_target_c, column_c)
        if (grad_vD := self.gradients.weight_vD) is not None:
            self._add_to_weight(grad_vD, part.hidden_cD, e_cv, a_c, of_target_c, column_c)

    def _coefficients(self, part: Chunk, targets: Targets, only_c: Tensor, sums_3c: Tensor) -> Tensor:
        """Those of the tokens that count, 0 for others. The sums and what is asked for them are kept."""
        index_c, is_good_c = part.index_c, only_c & ~is_cut(sums_3c)
        scored = target_logprobs(sums_3c, targets.offset_T)
        coefficient_c = self.coefficients(scored.logprobs_T, index_c).where(is_good_c, 0.0)
        self.sums_3T[:, index_c] = sums_3c.where(only_c, self.sums_3T[:, index_c])
        self.coefficient_T[index_c] = coefficient_c.where(only_c, self.coefficient_T[index_c])
        return coefficient_c

    def _finish_hidden(self, part: Chunk, grad_cD: Tensor, a_c: Tensor, of_target_c: Tensor, column_c: Tensor) -> None:
        for rows in in_cache(grad_cD):
            grad_cD[rows] *= a_c[rows, None]
            if self.layer.blocks:
                grad_cD[rows].addcmul_(of_target_c[rows, None], self.layer.weight_vD[column_c[rows]])
        self.tokens.reduce(grad_cD, self.gradients.hidden_tD, part.own)

    def _add_to_weight(
        self,
        grad_vD: Tensor,
        hidden_cD: Tensor,
        e_cv: Tensor,
        a_c: Tensor,
        of_target_c: Tensor,
        column_c: Tensor,
    ) -> None:
        scaled_cD = torch.empty_like(hidden_cD)
        for rows in in_cache(hidden_cD):
            torch.mul(hidden_cD[rows], a_c[rows, None], out=scaled_cD[rows])
        form = product if self._is_first else add_product
        form(e_cv.t(), scaled_cD, grad_vD)
        self._is_first = False
        if self.layer.blocks:
            for rows in in_cache(hidden_cD):
                grad_vD.index_add_(0, column_c[rows], of_target_c[rows, None] * hidden_cD[rows])
