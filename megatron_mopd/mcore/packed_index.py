"""Where packed tokens sit: index maps for attention, and rotary embedding, over many short sequences at once.

Both depend on `cu_seqlens` and the context-parallel rank alone, so they are computed once per micro-batch and kept as
long as its `cu_seqlens` tensor lives; no step loops over sequences.

Promises (tests/parity/test_local_layers.py): the rotary embedding equals upstream's in value and gradient; no map or
mask is larger than [n, s, S], and the n sequences of a group are of similar length, so that the work is of the order
of sum L^2.

Shape suffixes: T packed tokens on this context-parallel rank, A those of all its ranks, n sequences, S longest
sequence, s longest part of a sequence on this rank, h heads, d head width, r rotated width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass(frozen=True)
class LengthGroup:
    """Sequences of similar length, which attention pads to the longest of them."""

    num_sequences: int
    max_query: int
    """s: longest part of a sequence on this rank."""
    max_key: int
    """S: longest sequence."""
    mask_nsS: Tensor | None
    """[n, 1, s, S], True where a query sees a key; None where plain causal masking says the same."""


@dataclass(frozen=True)
class PackedIndex:
    """Where each packed token sits among the padded slots of all groups, group after group."""

    groups: tuple[LengthGroup, ...]
    query_slot_T: Tensor
    """Slot of this rank's tokens among sum(n * s)."""
    key_slot_A: Tensor
    """Slot of the tokens of all context-parallel ranks, rank after rank, among sum(n * S)."""
    position_T: Tensor
    """Position of this rank's tokens in their sequences."""
    _rotations: dict[Any, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)

    @property
    def query_slots(self) -> list[int]:
        """Number of query slots of each group."""
        return [group.num_sequences * group.max_query for group in self.groups]

    @property
    def key_slots(self) -> list[int]:
        """Number of key slots of each group."""
        return [group.num_sequences * group.max_key for group in self.groups]

    def rotation(self, freqs: Tensor, mscale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, r] of the angles `freqs` [S, 1, 1, r] at this rank's positions; sin with the sign that the
        rotation of halves gives it. Kept for the other layers."""
        key = (id(freqs), mscale, dtype)
        if key not in self._rotations:
            angle_T = freqs.flatten(1).index_select(0, self.position_T)[:, None]
            cos, sin = angle_T.cos().mul_(mscale), angle_T.sin().mul_(mscale)
            sin[..., : sin.shape[-1] // 2].neg_()
            self._rotations[key] = (freqs, cos.to(dtype), sin.to(dtype))  # holding freqs keeps its id its own
        return self._rotations[key][1:]


_INDEX_OF: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def packed_index(cu_seqlens: Tensor, cp_group: ProcessGroup) -> PackedIndex:
    """The index maps of a micro-batch, kept while its `cu_seqlens` tensor lives (every layer is handed that one)."""
    index = _INDEX_OF.get(cu_seqlens)
    if index is None:
        index = _INDEX_OF[cu_seqlens] = _packed_index(cu_seqlens.long(), cp_group.size(), cp_group.rank())
    return index


_SHORT = 32
"""Sequences up to this length are one group; above it, lengths within a factor of two are."""


def _packed_index(cu_seqlens: Tensor, cp: int, cp_rank: int) -> PackedIndex:
    """With cp > 1, every sequence is cut into 2 * cp equal chunks and rank r holds chunks r and 2 * cp - 1 - r."""
    length_n = cu_seqlens.diff()
    class_n = length_n.clamp(min=_SHORT).log2().ceil()
    sizes, query_base_n, key_base_n, num_queries, num_keys = [], length_n.clone(), length_n.clone(), 0, 0
    for length_class in class_n.unique():
        members = (class_n == length_class).nonzero().flatten()
        max_key = int(length_n[members].max())
        key_base_n[members] = num_keys + torch.arange(len(members)) * max_key
        query_base_n[members] = num_queries + torch.arange(len(members)) * (max_key // cp)
        num_keys += len(members) * max_key
        num_queries += len(members) * max_key // cp
        sizes.append((len(members), max_key // cp, max_key))

    of_ranks = [positions(length_n, cp, rank) for rank in range(cp)]
    sequence_T = torch.repeat_interleave(length_n // cp)
    offset_T = torch.arange(len(sequence_T)) - (cu_seqlens[:-1] // cp)[sequence_T]
    query_slot_T = query_base_n[sequence_T] + offset_T
    key_slot_A = torch.cat([key_base_n[sequence_T] + position_T for position_T in of_ranks])
    position_of_slot = torch.zeros(num_queries, dtype=torch.long).index_copy(0, query_slot_T, of_ranks[cp_rank])
    by_group = position_of_slot.split([n * s for n, s, _ in sizes])
    groups = [
        LengthGroup(n, s, S, None if cp == 1 else position.view(n, 1, s, 1) >= torch.arange(S))
        for (n, s, S), position in zip(sizes, by_group, strict=True)
    ]
    return PackedIndex(tuple(groups), query_slot_T, key_slot_A, of_ranks[cp_rank])


def positions(length_n: Tensor, cp: int, cp_rank: int) -> Tensor:
    """Position in its sequence of every token that a context-parallel rank holds, in its order."""
    local_n = length_n // cp
    sequence_T = torch.repeat_interleave(local_n)
    offset_T = torch.arange(len(sequence_T)) - (local_n.cumsum(0) - local_n)[sequence_T]
    if cp == 1:
        return offset_T
    chunk_T = length_n[sequence_T] // (2 * cp)
    first, second = cp_rank * chunk_T, (2 * cp - 1 - cp_rank) * chunk_T
    return torch.where(offset_T < chunk_T, first + offset_T, second + offset_T - chunk_T)


def apply_packed_rope(
    t: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    multi_latent_attention: bool = False,
    mscale: float = 1.0,
    cp_group: ProcessGroup | None = None,
) -> Tensor:
    """rope_utils._apply_rotary_pos_emb_thd without its loop over sequences. t [T, h, d], freqs [S, 1, 1, r]."""
    assert cp_group is not None
    assert not rotary_interleaved, "no family has it"
    width = freqs.shape[-1]
    turned, rest = t[..., :width], t[..., width:]
    if multi_latent_attention:  # pairs side by side become halves
        turned = torch.cat([turned[..., 0::2], turned[..., 1::2]], dim=-1)
    turned = _Rotate.apply(turned, *packed_index(cu_seqlens, cp_group).rotation(freqs, mscale, t.dtype))
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


class _Rotate(torch.autograd.Function):
    """(a, b) to (a cos - b sin, b cos + a sin) for the halves a and b of the last dimension."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return torch.addcmul(t * cos, t.roll(t.shape[-1] // 2, -1), sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return torch.addcmul(grad * cos, grad.roll(grad.shape[-1] // 2, -1), sin, value=-1), None, None
