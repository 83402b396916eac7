"""The language-model head that returns log-probs of given tokens instead of logits.

`LogprobHead` takes the place of GPTModel.output_layer: a ColumnParallelLinear with the same parameter and the same
sharded state, so checkpoints, DDP's hooks and tied embeddings see what they know. GPTModel.forward calls it as ever;
when targets are set it answers [T, 1, 3] (objectives/logprobs.py) where logits would be, and never forms logits of the
padded vocabulary.

Promises (law 12): logits are accumulated in float32 from the model's own dtype, divided by the sampling temperature,
over exactly the first `vocab_size` tokens.

Shape suffixes: T packed tokens, t this rank's slice of them under sequence parallelism, D width, v this rank's
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_mopd.mcore import device  # noqa: F401

# isort: split
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from megatron_mopd.objectives.logprobs import TargetLogprobs, vocab_parallel_logprobs


class LogprobHead(ColumnParallelLinear):
    vocab_size: int
    temperature: float
    _target_T: Tensor | None

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
        head.vocab_size, head.temperature, head._target_T = vocab_size, temperature, None
        model.output_layer = head
        return head

    @contextmanager
    def scoring(self, target_T: Tensor) -> Iterator[None]:
        """Within, the model's output is float32 [1, T, 3]: the columns of TargetLogprobs."""
        self._target_T = target_T
        try:
            yield
        finally:
            self._target_T = None

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if self._target_T is None:
            return super().forward(input_, weight, runtime_gather_output)
        own_or_tied = self.weight if weight is None else weight
        assert own_or_tied is not None
        return torch.stack(self._logprobs(input_, own_or_tied, self._target_T), dim=-1)[:, None], None

    def _logprobs(self, hidden_t1D: Tensor, weight_vD: Tensor, target_T: Tensor) -> TargetLogprobs:
        # Each rank's gradient of the hidden states is of its slice of the vocabulary: both branches sum them in
        # backward.
        if self.sequence_parallel:
            hidden_T1D = gather_from_sequence_parallel_region(hidden_t1D, True, group=self.tp_group)
        else:
            hidden_T1D = copy_to_tensor_model_parallel_region(hidden_t1D, group=self.tp_group)
        group = _group_of(self)
        start = group.rank() * self.output_size_per_partition
        v = min(self.output_size_per_partition, max(0, self.vocab_size - start))
        logits_Tv = _Float32Logits.apply(hidden_T1D.squeeze(1), weight_vD[:v])
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
