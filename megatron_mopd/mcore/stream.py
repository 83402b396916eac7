"""The models as full Hugging Face tensors, streamed from the ranks that own them: for export and for weight sync.

Every (expert-) tensor-parallel group whose values are exported has an owner, its first rank. The owner gathers the
other ranks' slices bucket by bucket, so that no rank ever holds the whole model.

Promises (tests/distributed/test_stream.py): over all owners each tensor of the checkpoint comes once, bit for bit, all
owners at the same time or one after the other. A rank holds the slices of one bucket, about BUCKET_BYTES for each rank
of the group, and the tensors made of one parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mopd.hf_folder import read_hf_config
from megatron_mopd.mcore.parameters import Parameter, geometry_of, parameters_of
from megatron_mopd.quantization.policy import BLOCK, is_quantized
from megatron_mopd.step_metrics import WeightBytes

# isort: split
from megatron.core.models.gpt import GPTModel

BUCKET_BYTES = 256 << 20
"""Slices are gathered over tensor-parallel ranks in messages of about this size."""


class HfStream:
    """`owners` is the same on every rank. Making one is collective."""

    def __init__(
        self,
        models: Sequence[GPTModel],
        folder: Path,
        value_of: Callable[[Parameter], Tensor] = attrgetter("tensor"),
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """`folder` is the Hugging Face checkpoint that the models are of; only its config.json is read. `value_of` a
        parameter is what is sent of it, of the same shape and dtype."""
        hf_config = read_hf_config(folder)
        self._value_of = value_of
        self._bucket_bytes = bucket_bytes
        self._geometry = geometry_of(models, hf_config)
        self._parameters = [p for p in parameters_of(models, hf_config) if p.owned]
        for parameter in self._parameters:
            self._check(parameter)
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, ({_owner(p) for p in self._parameters}, self._bytes_of_mine()))
        self.owners = sorted(set().union(*(owners for owners, _ in of_ranks)))
        self._bytes = [num_bytes for _, num_bytes in of_ranks]

    def num_bytes(self, with_quantized_experts: bool) -> WeightBytes:
        """Of all tensors."""
        sent, packed = (sum(of_rank) for of_rank in zip(*self._bytes, strict=True))
        return WeightBytes(sent, packed if with_quantized_experts else sent)

    def of(self, owner: int) -> Iterator[tuple[str, Tensor]]:
        """The tensors of `owner`, on its device. Every rank must run it to its end; ranks other than the owner get
        nothing, they only send. A tensor may be a view of the parameter itself: copy what is kept."""
        yield from self._full([p for p in self._parameters if _owner(p) == owner])

    def all(self) -> Iterator[tuple[str, Tensor]]:
        """Of each owner its own tensors, all owners at the same time."""
        yield from self._full(self._parameters)

    def _full(self, parameters: Sequence[Parameter]) -> Iterator[tuple[str, Tensor]]:
        for bucket in _buckets(parameters, self._bucket_bytes):
            shards = _gather([self._value_of(p) for p in bucket], bucket[0].group)
            if shards is None:
                continue
            for i, parameter in enumerate(bucket):
                full = parameter.sharding.unshard([shard[i] for shard in shards], self._geometry)
                yield from zip(parameter.hf_names, full, strict=True)

    def _bytes_of_mine(self) -> WeightBytes:
        """Of what this rank sends."""
        sent = packed = 0
        for p in self._parameters:
            if _owner(p) == dist.get_rank():
                shapes = p.sharding.shapes(tuple(p.tensor.shape), self._geometry, p.group.size())
                numel = sum(map(math.prod, shapes))
                plain = numel * p.tensor.element_size()
                sent += plain
                packed += numel // 2 + numel // BLOCK if is_quantized(p.name) else plain
        return WeightBytes(sent, packed)

    def _check(self, parameter: Parameter) -> None:
        """Before anything is sent: what is put together has the shapes that `load_hf` compared with the checkpoint."""
        shape, size = tuple(parameter.tensor.shape), parameter.group.size()
        full = parameter.sharding.unshard([torch.empty(shape, device="meta")] * size, self._geometry)
        assert [tuple(t.shape) for t in full] == parameter.sharding.shapes(shape, self._geometry, size), parameter.name


def _owner(parameter: Parameter) -> int:
    return dist.get_global_rank(parameter.group, 0)


def _buckets(parameters: Sequence[Parameter], bucket_bytes: int) -> Iterator[list[Parameter]]:
    """Parameters of one group and dtype in lists of about `bucket_bytes`; the same lists on every rank of the group."""

    def kind(p: Parameter) -> tuple[bool, str]:
        return p.group is parameters[0].group, str(p.tensor.dtype)

    for _, alike in groupby(sorted(parameters, key=kind), key=kind):
        bucket: list[Parameter] = []
        filled = 0
        for parameter in alike:
            bucket.append(parameter)
            filled += parameter.tensor.nbytes
            if filled >= bucket_bytes:
                yield bucket
                bucket, filled = [], 0
        if bucket:
            yield bucket


def _gather(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[list[Tensor]] | None:
    """[rank of the group][tensor] on the first rank of the group, None on the others; one message."""
    if group.size() == 1:
        return [list(tensors)]
    flat = torch.cat([x.flatten() for x in tensors])
    received = [torch.empty_like(flat) for _ in range(group.size())] if group.rank() == 0 else None
    dist.gather(flat, received, group=group, group_dst=0)
    if received is None:
        return None
    sizes = [x.numel() for x in tensors]
    return [[x.view(y.shape) for x, y in zip(rank.split(sizes), tensors, strict=True)] for rank in received]
