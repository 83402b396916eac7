"""Layers that stand in for Transformer Engine's where it is absent, and the swap that puts them into a local spec.

`LocalRMSNorm` accepts sequence parallelism, which upstream's WrappedTorchNorm refuses. `LocalCoreAttention` does what
upstream's DotProductAttention refuses: context parallelism, packed (thd) sequences and MLA's head sizes. Packed
sequences are padded inside the attention only, to the longest of a group of similar length: the cost is of the order of
sum L^2, and never T^2.

Promises (tests/parity/test_local_layers.py): equal to attention one sequence at a time, in value and gradient, for any
lengths and context-parallel size.

Shape suffixes: T packed tokens on this context-parallel rank, A those of all its ranks, h query heads, g key-value
heads, d head width.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_mopd.errors import UserError
from megatron_mopd.mcore import device  # noqa: F401
from megatron_mopd.mcore.packed_index import PackedIndex, packed_index, positions

# isort: split
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.torch_norm import WrappedTorchNorm


class LocalRMSNorm(torch.nn.Module):
    """RMSNorm whose weight is marked for the gradient sum over sequence-parallel ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: object):
        super().__init__()
        if config.normalization != "RMSNorm" or config.layernorm_zero_centered_gamma:
            raise UserError("megatron: without Transformer Engine only plain RMSNorm is supported; remove the option")
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return _RMSNorm.apply(x, self.weight, self.eps)


class _RMSNorm(torch.autograd.Function):
    """x / rms(x) * weight in float32; on a CPU torch's own is six operators and twice as many in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = x.float()
        scale = torch.linalg.vector_norm(x32, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        normed = x32 * scale
        ctx.save_for_backward(normed, scale, weight)
        return (normed * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, scale, weight = ctx.saved_tensors
        width = normed.shape[-1]
        grad_normed = (grad * normed).reshape(-1, width)
        grad_weight = grad_normed.sum(0)
        mean = (grad_normed @ weight.to(normed.dtype)).view(scale.shape).div_(width)
        grad_x = torch.addcmul(grad * weight, normed, mean, value=-1).mul_(scale)
        return grad_x.to(grad.dtype), grad_weight.to(weight.dtype), None


class LocalCoreAttention(MegatronModule):
    """Causal attention on torch's scaled_dot_product_attention; context-parallel ranks gather keys and values."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: object,  # k_channels, v_channels: read from the tensors; cp_comm_type: always gathered
    ):
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        assert attention_type == "self"
        assert attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal)
        self.tp_group, self.cp_group = groups.tp, groups.cp
        self.scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """query [T, h, d], key and value [T, g, d] -> [T, h * d]; not packed: [s, b, h, d] -> [s, b, h * d]."""
        assert attention_bias is None
        assert attention_mask is None, "the causal mask comes from the positions"
        if self.config.multi_latent_attention and self.config.tensor_model_parallel_size > 1:
            key = _sum_rope_gradient_over_tp(key, self.config.qk_pos_emb_head_dim, self.tp_group)  # pyright: ignore
        if self.cp_group.size() > 1:
            key, value = (gather_from_sequence_parallel_region(x, True, self.cp_group) for x in (key, value))
        if packed_seq_params is None:
            return self._unpacked(query, key, value)
        return self._packed(query, key, value, packed_index(_bounds(packed_seq_params), self.cp_group))

    def _packed(self, query_Thd: Tensor, key_Agd: Tensor, value_Agd: Tensor, index: PackedIndex) -> Tensor:
        queries = _pad(query_Thd, index.query_slot_T, index.query_slots)
        keys, values = (_pad(x, index.key_slot_A, index.key_slots) for x in (key_Agd, value_Agd))
        outputs = []
        for group, query, key, value in zip(index.groups, queries, keys, values, strict=True):
            q, k, v = (x.unflatten(0, (group.num_sequences, -1)).transpose(1, 2) for x in (query, key, value))
            outputs.append(self._attend(q, k, v, group.mask_nsS).transpose(1, 2).flatten(0, 1))  # [n * s, h, d]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output.index_select(0, index.query_slot_T).flatten(1)

    def _unpacked(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cp, mask = self.cp_group.size(), None
        if cp > 1:
            length = torch.tensor([key.shape[0]])
            position_k = torch.cat([positions(length, cp, rank) for rank in range(cp)])
            mask = positions(length, cp, self.cp_group.rank())[:, None] >= position_k
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        return self._attend(query, key, value, mask).permute(2, 0, 1, 3).flatten(2)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """[b, h, s, d], [b, g, S, d] -> [b, h, s, d]."""
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
            dropout_p=self.dropout if self.training else 0.0,
        )


def _bounds(packed: PackedSeqParams) -> Tensor:
    return packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded


def _pad(x_Thd: Tensor, slot_T: Tensor, slots: list[int]) -> tuple[Tensor, ...]:
    """[T, h, d] -> one [slots, h, d] per group, with zeros in the slots that no token has."""
    padded = x_Thd.new_zeros(sum(slots), *x_Thd.shape[1:]).index_copy(0, slot_T, x_Thd)
    return (padded,) if len(slots) == 1 else padded.split(slots)


def _sum_rope_gradient_over_tp(key: Tensor, rope_width: int, tp_group: ProcessGroup) -> Tensor:
    """Upstream's MLA over ColumnParallelLinear hands every rank the whole rotary key, shared by its heads, and splits
    its gradient over tensor-parallel ranks without summing it (relative gradient error 1e-2, the loss unchanged)."""
    rest, rope = key.split([key.shape[-1] - rope_width, rope_width], dim=-1)
    return torch.cat([rest, _SumGradient.apply(rope, tp_group)], dim=-1)


class _SumGradient(torch.autograd.Function):
    """The identity; its gradient is summed over the group. Upstream's own drops the sum of a gradient with strides."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


_LOCAL = {DotProductAttention: LocalCoreAttention, WrappedTorchNorm: LocalRMSNorm}


def use_local_layers(spec: Any) -> None:
    """Swap the modules above into a layer or block spec, in place."""
    if isinstance(spec, list | tuple):
        for part in spec:
            use_local_layers(part)
    elif dataclasses.is_dataclass(spec):
        for field in dataclasses.fields(spec):
            value = getattr(spec, field.name)
            if isinstance(value, type):
                setattr(spec, field.name, _LOCAL.get(value, value))
            else:
                use_local_layers(value.keywords.values() if isinstance(value, functools.partial) else value)
