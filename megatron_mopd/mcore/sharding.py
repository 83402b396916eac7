"""How one Megatron tensor is made of Hugging Face tensors and cut over tensor-parallel ranks, and back, bit for bit.

One pair of functions per kind of `families.Kind`; nothing here knows a model's names.

Shape suffixes: V vocabulary, D width in, F width out, h query heads, g query groups, d head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_mopd.mcore.families import Kind


@dataclass(frozen=True)
class Geometry:
    """The numbers of the model that the kinds `vocab` and `qkv` need."""

    vocab_size: int
    padded_vocab_size: int
    num_heads: int
    num_query_groups: int
    head_width: int


Shape = tuple[int, ...]


@dataclass(frozen=True)
class Sharding:
    """Of one kind, over `size` tensor-parallel ranks."""

    shard: Callable[[Sequence[Tensor], Geometry, int, int], Tensor]
    """(Hugging Face tensors, geometry, rank, size) -> this rank's slice."""
    unshard: Callable[[Sequence[Tensor], Geometry], list[Tensor]]
    """(every rank's slice in rank order, geometry) -> Hugging Face tensors."""
    shapes: Callable[[Shape, Geometry, int], list[Shape]]
    """(shape of one rank's slice, geometry, size) -> shapes of the Hugging Face tensors."""


def _shard_vocab(full: Sequence[Tensor], geometry: Geometry, rank: int, size: int) -> Tensor:
    padding = geometry.padded_vocab_size - geometry.vocab_size
    padded_VD = torch.cat([full[0], full[0].new_zeros(padding, full[0].shape[1])]) if padding else full[0]
    return padded_VD.chunk(size)[rank]


def _fuse_qkv(full: Sequence[Tensor], geometry: Geometry) -> Tensor:
    """Megatron keeps the heads of one query group together: [q..q, k, v] per group."""
    return torch.cat([x.unflatten(0, (geometry.num_query_groups, -1)) for x in full], dim=1).flatten(0, 1)


def _split_qkv(shards: Sequence[Tensor], geometry: Geometry) -> list[Tensor]:
    d = geometry.head_width
    queries = geometry.num_heads // geometry.num_query_groups * d
    fused = torch.cat(list(shards)).unflatten(0, (geometry.num_query_groups, queries + 2 * d))
    return [x.flatten(0, 1) for x in fused.split([queries, d, d], dim=1)]


def _qkv_shapes(shard: Shape, geometry: Geometry, size: int) -> list[Shape]:
    heads = (geometry.num_heads, geometry.num_query_groups, geometry.num_query_groups)
    return [(n * geometry.head_width, *shard[1:]) for n in heads]


SHARDINGS: dict[Kind, Sharding] = {
    "replicated": Sharding(
        shard=lambda full, geometry, rank, size: full[0],
        unshard=lambda shards, geometry: [shards[0]],
        shapes=lambda shard, geometry, size: [shard],
    ),
    "column": Sharding(
        shard=lambda full, geometry, rank, size: full[0].chunk(size)[rank],
        unshard=lambda shards, geometry: [torch.cat(list(shards))],
        shapes=lambda shard, geometry, size: [(shard[0] * size, *shard[1:])],
    ),
    "row": Sharding(
        shard=lambda full, geometry, rank, size: full[0].chunk(size, dim=1)[rank],
        unshard=lambda shards, geometry: [torch.cat(list(shards), dim=1)],
        shapes=lambda shard, geometry, size: [(shard[0], shard[1] * size)],
    ),
    "vocab": Sharding(
        shard=_shard_vocab,
        unshard=lambda shards, geometry: [torch.cat(list(shards))[: geometry.vocab_size]],
        shapes=lambda shard, geometry, size: [(geometry.vocab_size, *shard[1:])],
    ),
    "qkv": Sharding(
        shard=lambda full, geometry, rank, size: _fuse_qkv(full, geometry).chunk(size)[rank],
        unshard=_split_qkv,
        shapes=_qkv_shapes,
    ),
    "gated": Sharding(
        shard=lambda full, geometry, rank, size: torch.cat([x.chunk(size)[rank] for x in full]),
        unshard=lambda shards, geometry: [torch.cat([x.chunk(2)[half] for x in shards]) for half in (0, 1)],
        shapes=lambda shard, geometry, size: [(shard[0] // 2 * size, *shard[1:])] * 2,
    ),
}
