"""Divergences of the tokens of a micro-batch from their teachers, and the gradient of a loss made of them.

Teacher by teacher and chunk by chunk: the logits of both, what objectives/distribution.py makes of them, and the
gradients of the hidden states and the weight at once, as in one_pass.py. A teacher's logits want a normaliser of their
own, so a chunk has all of its logits at hand, `BYTES_OF_LOGIT` of each, and takes fewer tokens.

Promises (tests/distributed/test_full_kl.py): value and gradient are those of float64 autograd, at every layout.

Shape suffixes: T packed tokens, S those of one teacher, c those of a chunk, D width, v this rank's vocabulary without
padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_mopd.mcore.one_pass import Coefficients, Gradients
from megatron_mopd.mcore.products import add_product, product
from megatron_mopd.mcore.vocab_slice import VocabSlice
from megatron_mopd.objectives.distribution import Divergence, TargetDivergence

BYTES_OF_LOGIT = 11 * torch.float32.itemsize
"""What exists at once of a token and an entry of the vocabulary: so many float32 tensors, fewer for full_kl."""


class TeacherRows(NamedTuple):
    """The tokens of a micro-batch that one teacher has scored."""

    at_S: Tensor
    """Among the T."""
    hidden_SD: Tensor
    """The teacher's; D is its own width."""
    weight_vD: Tensor
    """Its output layer's, of this rank's part of the vocabulary without padding."""

    def chunks(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Places and hidden states."""
        yield from zip(self.at_S.split(size), self.hidden_SD.split(size), strict=True)


@torch.no_grad()
def divergence_pass(
    layer: VocabSlice,
    hidden_TD: Tensor,
    target_T: Tensor,
    coefficients: Coefficients,
    divergence: Divergence,
    teachers: Iterable[TeacherRows],
    chunk: int,
    is_frozen: bool = False,
) -> tuple[TargetDivergence, Tensor, Gradients]:
    """Of all T tokens, 0 where no teacher is; the loss, the sum of coefficient * divergence; and its gradients, of the
    hidden states [T, D] that from this rank's columns alone; of a frozen weight none, and no product for it."""
    found = TargetDivergence(*torch.zeros(len(TargetDivergence._fields), len(target_T), device=hidden_TD.device))
    grad_weight_vD = None if is_frozen else torch.zeros_like(layer.weight_vD).float()
    gradients = Gradients(torch.zeros_like(hidden_TD).float(), grad_weight_vD)
    loss = found.divergence_T.new_zeros(())
    for teacher in teachers:
        theirs = layer.of_teacher(teacher.weight_vD.to(teacher.hidden_SD.dtype))
        for at_c, teacher_cD in teacher.chunks(chunk):
            hidden_cD = hidden_TD[at_c]
            logits = layer.logits(hidden_cD), theirs.logits(teacher_cD)
            scored, grad_cv = divergence(*logits, target_T[at_c], layer.vocab_start, layer.group)
            del logits
            coefficient_c = coefficients(scored.logprobs_T, at_c)
            loss += (coefficient_c * scored.divergence_T).sum()
            for all_T, part_c in zip(found, scored, strict=True):
                all_T[at_c] = part_c
            _add(grad_cv.mul_(coefficient_c[:, None] / layer.temperature), at_c, hidden_cD, layer, gradients)
    return found, loss, gradients


def _add(grad_cv: Tensor, at_c: Tensor, hidden_cD: Tensor, layer: VocabSlice, gradients: Gradients) -> None:
    grad_cv = grad_cv.to(layer.weight_vD.dtype)
    grad_cD = gradients.hidden_tD.new_empty(hidden_cD.shape)
    product(grad_cv, layer.weight_vD, grad_cD)
    if gradients.weight_vD is not None:
        add_product(grad_cv.t(), hidden_cD, gradients.weight_vD)
    gradients.hidden_tD[at_c] = grad_cD
