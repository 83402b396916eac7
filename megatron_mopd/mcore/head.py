"""The language-model head that returns log-probs of given tokens, or divergences from teachers, instead of logits.

`LogprobHead` takes the place of GPTModel.output_layer: a ColumnParallelLinear with the same parameter and the same
sharded state, so checkpoints, DDP's hooks and tied embeddings see what they know. GPTModel.forward calls it as ever;
when targets are set it answers [T, 1, 3] (objectives/logprobs.py) or [T, 1, 4] (objectives/distribution.py) where
logits would be, and never forms logits of the padded vocabulary.

Promises (law 12): logits are accumulated in float32 from the model's own dtype, divided by the sampling temperature,
over exactly the first `vocab_size` tokens; a teacher's from its hidden states likewise. Without gradients no more than
`LOGITS` of them exist at once; with a divergence, those of one teacher's tokens.

Shape suffixes: T packed tokens, t this rank's slice of them under sequence parallelism, S those that are scored, D
width, v this rank's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_mopd.mcore import device
from megatron_mopd.objectives.distribution import Divergence, TargetDivergence
from megatron_mopd.objectives.logprobs import TargetLogprobs, vocab_parallel_logprobs

# isort: split
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

LOGITS = 1 << 28 if device.HAS_GPU else 1 << 22
"""Entries of the largest logits tensor of a scoring pass; on a CPU, what stays in its cache."""


class TeacherRows(NamedTuple):
    """The tokens of a micro-batch that one teacher has scored."""

    at_S: Tensor
    """Among the T."""
    hidden_SD: Tensor
    """The teacher's; D is its own width."""
    weight_vD: Tensor
    """Its output layer's, of this rank's part of the vocabulary without padding."""


class LogprobHead(ColumnParallelLinear):
    vocab_size: int
    temperature: float
    _answer: Callable[[Tensor, Tensor], Tensor] | None
    """From hidden_TD and weight_vD to what is returned in place of logits; None: logits."""

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
        (None: at all). With the hidden states that the head reads, [1, S, 3 + D]."""
        yield from self._answering(partial(self._scores, target_T, at_S, with_hidden))

    @contextmanager
    def comparing(self, target_T: Tensor, divergence: Divergence, teachers: Iterable[TeacherRows]) -> Iterator[None]:
        """Within, the model's output is float32 [1, T, 4]: the columns of TargetDivergence, 0 where no teacher is."""
        yield from self._answering(partial(self._divergences, target_T, divergence, teachers))

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
        return self._answer(self._whole(input_).squeeze(1), own_or_tied)[:, None], None

    def _scores(
        self, target_T: Tensor, at_S: Tensor | None, with_hidden: bool, hidden_TD: Tensor, weight_vD: Tensor
    ) -> Tensor:
        if at_S is not None:
            hidden_TD, target_T = hidden_TD[at_S], target_T[at_S]
        # With gradients the parts would be kept anyway. Ranks differ in v, but cut alike.
        num = max(1, len(target_T) if torch.is_grad_enabled() else LOGITS // self.output_size_per_partition)
        parts = [
            torch.stack(self._logprobs(hidden, weight_vD, target), dim=-1)
            for hidden, target in zip(hidden_TD.split(num), target_T.split(num), strict=True)
        ]
        return torch.cat([torch.cat(parts), hidden_TD.float()], dim=-1) if with_hidden else torch.cat(parts)

    def _divergences(
        self,
        target_T: Tensor,
        divergence: Divergence,
        teachers: Iterable[TeacherRows],
        hidden_TD: Tensor,
        weight_vD: Tensor,
    ) -> Tensor:
        places, parts = [], []
        for teacher in teachers:
            logits_Sv = self._logits(hidden_TD[teacher.at_S], weight_vD[: len(self.vocabulary)])
            with torch.no_grad():
                teacher_logits_Sv = self._logits(teacher.hidden_SD, teacher.weight_vD.to(teacher.hidden_SD.dtype))
            target_S = target_T[teacher.at_S]
            found = divergence(logits_Sv, teacher_logits_Sv, target_S, self.vocabulary.start, _group_of(self))
            places.append(teacher.at_S)
            parts.append(torch.stack(found, dim=-1))
        out_T4 = torch.zeros(len(target_T), len(TargetDivergence._fields), device=hidden_TD.device)
        return out_T4.index_put((torch.cat(places),), torch.cat(parts))

    def _whole(self, hidden_t1D: Tensor) -> Tensor:
        """The hidden states of all T tokens."""
        # Each rank's gradient of the hidden states is of its slice of the vocabulary: both branches sum them in
        # backward.
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden_t1D, True, group=self.tp_group)
        return copy_to_tensor_model_parallel_region(hidden_t1D, group=self.tp_group)

    def _logprobs(self, hidden_TD: Tensor, weight_vD: Tensor, target_T: Tensor) -> TargetLogprobs:
        logits_Tv = self._logits(hidden_TD, weight_vD[: len(self.vocabulary)])
        return vocab_parallel_logprobs(logits_Tv, target_T, self.vocabulary.start, _group_of(self))

    def _logits(self, hidden_TD: Tensor, weight_vD: Tensor) -> Tensor:
        logits_Tv = _Float32Logits.apply(hidden_TD, weight_vD)
        return logits_Tv if self.temperature == 1.0 else logits_Tv / self.temperature


def _group_of(layer: ColumnParallelLinear) -> ProcessGroup:
    assert isinstance(layer.tp_group, ProcessGroup)
    return layer.tp_group


class _Float32Logits(torch.autograd.Function):
    """hidden @ weight.T in float32. Rounding logits to bfloat16 would cost more than the reward is large."""

    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, weight_vD: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_TD, weight_vD)
        if hidden_TD.is_cuda and hidden_TD.dtype != torch.float32:
            return torch.mm(hidden_TD, weight_vD.t(), out_dtype=torch.float32)
        return hidden_TD.float() @ weight_vD.float().t()  # the CPU has no matrix product with another output dtype

    @staticmethod
    def backward(ctx: Any, grad_Tv: Tensor) -> tuple[Tensor, Tensor]:
        hidden_TD, weight_vD = ctx.saved_tensors
        grad_Tv = grad_Tv.to(hidden_TD.dtype)
        return grad_Tv @ weight_vD, grad_Tv.t() @ hidden_TD
