"""The language-model head that returns log-probs of given tokens instead of logits.

`LogprobHead` takes the place of GPTModel.output_layer: a ColumnParallelLinear with the same parameter and the same
sharded state, so checkpoints, DDP's hooks and tied embeddings see what they know. GPTModel.forward calls it as ever;
when targets are set it answers [T, 1, 3] (objectives/logprobs.py) where logits would be, and never forms logits of the
padded vocabulary.

Promises (law 12): logits are accumulated in float32 from the model's own dtype, divided by the sampling temperature,
over exactly the first `vocab_size` tokens. Without gradients no more than `LOGITS` of them exist at once.

Shape suffixes: T packed tokens, t this rank's slice of them under sequence parallelism, S those that are scored, D
width, v this rank's vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_mopd.mcore import device
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


class LogprobHead(ColumnParallelLinear):
    vocab_size: int
    temperature: float
    _target_T: Tensor | None
    _at_S: Tensor | None

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
        head._target_T = head._at_S = None
        model.output_layer = head
        return head

    @contextmanager
    def scoring(self, target_T: Tensor, at_S: Tensor | None = None) -> Iterator[None]:
        """Within, the model's output is float32 [1, S, 3]: the columns of TargetLogprobs, at the given of the T places
        (None: at all)."""
        self._target_T, self._at_S = target_T, at_S
        try:
            yield
        finally:
            self._target_T = self._at_S = None

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if self._target_T is None:
            return super().forward(input_, weight, runtime_gather_output)
        own_or_tied = self.weight if weight is None else weight
        assert own_or_tied is not None
        hidden_TD, target_T = self._whole(input_).squeeze(1), self._target_T
        if self._at_S is not None:
            hidden_TD, target_T = hidden_TD[self._at_S], target_T[self._at_S]
        # With gradients the parts would be kept anyway. Ranks differ in v, but cut alike.
        num = max(1, len(target_T) if torch.is_grad_enabled() else LOGITS // self.output_size_per_partition)
        parts = [
            torch.stack(self._logprobs(hidden, own_or_tied, target), dim=-1)
            for hidden, target in zip(hidden_TD.split(num), target_T.split(num), strict=True)
        ]
        return torch.cat(parts)[:, None], None

    def _whole(self, hidden_t1D: Tensor) -> Tensor:
        """The hidden states of all T tokens."""
        # Each rank's gradient of the hidden states is of its slice of the vocabulary: both branches sum them in
        # backward.
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden_t1D, True, group=self.tp_group)
        return copy_to_tensor_model_parallel_region(hidden_t1D, group=self.tp_group)

    def _logprobs(self, hidden_TD: Tensor, weight_vD: Tensor, target_T: Tensor) -> TargetLogprobs:
        group = _group_of(self)
        start = group.rank() * self.output_size_per_partition
        v = min(self.output_size_per_partition, max(0, self.vocab_size - start))
        logits_Tv = _Float32Logits.apply(hidden_TD, weight_vD[:v])
        if self.temperature != 1.0:
            logits_Tv = logits_Tv / self.temperature
        return vocab_parallel_logprobs(logits_Tv, target_T, start, group)


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
