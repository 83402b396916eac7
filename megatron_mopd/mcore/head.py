"""The language-model head that returns log-probs of given tokens, or divergences from teachers, instead of logits.

`LogprobHead` takes the place of GPTModel.output_layer: a ColumnParallelLinear with the same parameter and the same
sharded state, so checkpoints, DDP's hooks and tied embeddings see what they know. GPTModel.forward calls it as ever;
within one of the three contexts below it answers [1, S, columns] where logits would be.

For training it is told how to get the objective's coefficients, and forms the gradients with the log-probs
(one_pass.py, divergence_pass.py). The loss is a number then, whose gradient only needs to be scaled in backward. It is
the sum of the last column: at the first token, with 0 for the others.

Promises (law 12): logits are accumulated in float32 from the model's own dtype, divided by the sampling temperature,
over exactly the first `vocab_size` tokens; a teacher's from its hidden states likewise. Beyond the gradients, memory is
about SCRATCH_BYTES of vocab_slice.py, and does not grow with the number of tokens; a frozen layer costs no product for
its gradient (tests/parity/test_logprob_head.py, test_logprob_head_cost.py).

Shape suffixes: T packed tokens, t this rank's slice of them under sequence parallelism, S those that are scored, P this
rank's vocabulary with padding, v without, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_mopd.mcore import device
from megatron_mopd.mcore.divergence_pass import BYTES_OF_LOGIT, TeacherRows, divergence_pass
from megatron_mopd.mcore.one_pass import Coefficients, Gradients, one_pass
from megatron_mopd.mcore.token_chunks import TokenChunks
from megatron_mopd.mcore.vocab_slice import VocabSlice, block_of, chunk_of
from megatron_mopd.objectives.distribution import Divergence

# isort: split
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

SCORED_TOKENS = 1 << 13 if device.HAS_GPU else 1 << 10
"""Of a chunk of a scoring pass, which keeps nothing of that size."""


class LogprobHead(ColumnParallelLinear):
    vocab_size: int
    temperature: float
    _answer: Callable[[Tensor, Tensor], Tensor] | None
    """From the hidden states [t, 1, D] and the weight [P, D] to [S, columns] in place of logits; None: logits."""

    @classmethod
    def install(cls, model: GPTModel, vocab_size: int, temperature: float) -> LogprobHead:
        """Replace the output layer of the last pipeline stage; call before DDP wraps the model."""
        old = model.output_layer
        assert model.config.init_method is not None  # TransformerConfig sets it
        head = cls(
            old.input_size,
            old.output_size,
            config=old.config,
            init_method=model.config.init_method,
            bias=False,
            gather_output=old.gather_output,
            skip_weight_param_allocation=True,
            embedding_activation_buffer=old.embedding_activation_buffer,
            grad_output_buffer=old.grad_output_buffer,
            tp_group=_group_of(old),
        )
        head.weight = old.weight  # None where it is tied to the embedding of the same stage
        head.vocab_size, head.temperature = vocab_size, temperature
        head._answer = None
        model.output_layer = head
        return head

    @property
    def vocabulary(self) -> range:
        """The tokens whose logits this rank has."""
        start = min(_group_of(self).rank() * self.output_size_per_partition, self.vocab_size)
        return range(start, min(start + self.output_size_per_partition, self.vocab_size))

    @contextmanager
    def scoring(self, target_T: Tensor, at_S: Tensor | None = None, with_hidden: bool = False) -> Iterator[None]:
        """Within, the model's output is float32 [1, S, 3]: the columns of TargetLogprobs, at the given of the T places
        (None: at all). With the hidden states that the head reads, [1, S, 3 + D]. It has no gradient."""
        yield from self._answering(partial(self._score, target_T, at_S, with_hidden))

    @contextmanager
    def learning(self, target_T: Tensor, coefficients: Coefficients) -> Iterator[None]:
        """Within, the model's output is float32 [1, T, 4]: the columns of TargetLogprobs and the loss, the sum of
        coefficient * log-prob, which has a gradient."""
        yield from self._answering(partial(self._train, target_T, coefficients))

    @contextmanager
    def comparing(
        self,
        target_T: Tensor,
        coefficients: Coefficients,
        divergence: Divergence,
        teachers: Iterable[TeacherRows],
    ) -> Iterator[None]:
        """Within, the model's output is float32 [1, T, 5]: the columns of TargetDivergence, 0 where no teacher is, and
        the loss, the sum of coefficient * divergence, which has a gradient."""
        yield from self._answering(partial(self._compare, target_T, coefficients, divergence, teachers))

    def _answering(self, answer: Callable[[Tensor, Tensor], Tensor]) -> Iterator[None]:
        self._answer = answer
        try:
            yield
        finally:
            self._answer = None

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if self._answer is None:
            return super().forward(input_, weight, runtime_gather_output)
        own_or_tied = self.weight if weight is None else weight
        assert own_or_tied is not None
        return self._answer(input_, own_or_tied)[:, None], None

    @torch.no_grad()
    def _score(
        self, target_T: Tensor, at_S: Tensor | None, with_hidden: bool, hidden_t1D: Tensor, weight_PD: Tensor
    ) -> Tensor:
        hidden_TD = self._whole(hidden_t1D)
        if at_S is not None:
            hidden_TD, target_T = hidden_TD[at_S], target_T[at_S]
        layer = self._slice(weight_PD, min(SCORED_TOKENS, len(target_T)))
        scored = layer.score(hidden_TD, target_T, SCORED_TOKENS)
        columns = torch.stack(scored, dim=-1)
        return torch.cat([columns, hidden_TD.float()], dim=-1) if with_hidden else columns

    def _train(self, target_T: Tensor, coefficients: Coefficients, hidden_t1D: Tensor, weight_PD: Tensor) -> Tensor:
        chunk = self._chunk(len(target_T), weight_PD.element_size(), weight_PD)
        tokens = TokenChunks(hidden_t1D.detach().squeeze(1), chunk, _group_of(self), self.sequence_parallel)
        layer, is_frozen = self._slice(weight_PD, chunk), not weight_PD.requires_grad
        scored, coefficient_T, gradients = one_pass(layer, tokens, target_T, coefficients, is_frozen)
        loss = (coefficient_T * scored.logprobs_T).sum()
        return _with_loss(scored, _FormedGradients.apply(loss, hidden_t1D, weight_PD, gradients))

    def _compare(
        self,
        target_T: Tensor,
        coefficients: Coefficients,
        divergence: Divergence,
        teachers: Iterable[TeacherRows],
        hidden_t1D: Tensor,
        weight_PD: Tensor,
    ) -> Tensor:
        hidden_TD = self._whole(hidden_t1D)
        chunk = self._chunk(len(target_T), BYTES_OF_LOGIT, weight_PD)
        layer = self._slice(weight_PD, chunk)
        scored, loss, gradients = divergence_pass(
            *(layer, hidden_TD.detach(), target_T, coefficients, divergence, teachers, chunk),
            is_frozen=not weight_PD.requires_grad,
        )
        return _with_loss(scored, _FormedGradients.apply(loss, hidden_TD, weight_PD, gradients))

    def _whole(self, hidden_t1D: Tensor) -> Tensor:
        """The hidden states of all T tokens."""
        # Each rank's gradient of the hidden states is of its slice of the vocabulary: both branches sum them in
        # backward.
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden_t1D, True, group=self.tp_group).squeeze(1)
        return copy_to_tensor_model_parallel_region(hidden_t1D, group=self.tp_group).squeeze(1)

    def _chunk(self, num_tokens: int, bytes_of_logit: int, weight_PD: Tensor) -> int:
        """Ranks differ in v, but cut alike."""
        return chunk_of(num_tokens, self.output_size_per_partition, bytes_of_logit, weight_PD.device)

    def _slice(self, weight_PD: Tensor, chunk: int) -> VocabSlice:
        weight_vD = weight_PD.detach()[: len(self.vocabulary)]
        block = block_of(chunk, self.output_size_per_partition, weight_PD.device)
        return VocabSlice(weight_vD, self.vocabulary.start, self.temperature, _group_of(self), block)


def _group_of(layer: ColumnParallelLinear) -> ProcessGroup:
    assert isinstance(layer.tp_group, ProcessGroup)
    return layer.tp_group


def _with_loss(columns: Iterable[Tensor], loss: Tensor) -> Tensor:
    """[T, columns + 1]"""
    found = torch.stack([*columns], dim=-1)
    return torch.cat([found, torch.nn.functional.pad(loss[None], (0, len(found) - 1))[:, None]], dim=-1)


class _FormedGradients(torch.autograd.Function):
    """A loss whose gradients are known: backward scales them."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, hidden: Tensor, weight_PD: Tensor, gradients: Gradients) -> Tensor:
        ctx.save_for_backward(weight_PD)
        ctx.gradients, ctx.hidden_shape, ctx.hidden_dtype = gradients, hidden.shape, hidden.dtype
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[None, Tensor | None, Tensor | None, None]:
        (weight_PD,) = ctx.saved_tensors
        gradients: Gradients = ctx.gradients
        grad_hidden = grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_hidden = gradients.hidden_tD.mul_(scale).to(ctx.hidden_dtype).view(ctx.hidden_shape)
        if gradients.weight_vD is not None:
            grad_weight = _accumulate(weight_PD, gradients.weight_vD, scale)
        ctx.gradients = None
        return None, grad_hidden, grad_weight, None


def _accumulate(weight_PD: Tensor, grad_vD: Tensor, scale: Tensor) -> Tensor:
    """Add to the gradient that DDP keeps in `main_grad`, if there is one, and return what autograd shall see.

    As Megatron's own layers that add there themselves (LinearWithGradAccumulationAndAsyncCommunication): DDP's hook
    waits for a gradient to come and ignores what is in it, unless other gradients of the same weight, an embedding's,
    come the same way.
    """
    main_grad: Tensor | None = getattr(weight_PD, "main_grad", None)
    if main_grad is None:
        grad_PD = torch.zeros_like(weight_PD)
        grad_PD[: len(grad_vD)] = grad_vD.mul_(scale)
        return grad_PD
    main_grad[: len(grad_vD)].add_(grad_vD.mul_(scale))
    weight_PD.grad_added_to_main_grad = True  # pyright: ignore[reportAttributeAccessIssue]
    return torch.zeros_like(weight_PD) if getattr(weight_PD, "zero_out_wgrad", False) else torch.empty_like(weight_PD)
