"""Several teachers of one architecture in one model: a switch is a change of pointers.

Each rank keeps its shard of each teacher in one of three places: on the device (at most `max_resident`, the least
recently used leaves first), in host memory (at most `max_offloaded`, pinned where there is a GPU), or nowhere, and then
its files are read again. What has left the device is copied to the host once: weights never change. Buffers on the
device are made once and used again, so that no switch needs more memory than the ones before.

Promises (tests/distributed/test_teacher_ranks.py): a teacher's weights are the same bits whatever was served in
between, in every setting; files that hold other weights than at the start are refused. All ranks see the same requests
in the same order, so all take the same decisions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mopd.config import Teacher
from megatron_mopd.errors import UserError
from megatron_mopd.mcore import checkpoint, device, weights
from megatron_mopd.mcore.parameters import persistent_buffers
from megatron_mopd.mcore.quantized_experts import put_on_grid
from megatron_mopd.quantization.formats import Rule, is_on_grid
from megatron_mopd.quantization.packed_layouts import EXPERT
from megatron_mopd.resume import QUANTIZATION, read_facts

# isort: split
from megatron.core.models.gpt import GPTModel

Shard = list[Tensor]
_INTEGER_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TeacherWeights:
    """The shards of all teachers on this rank, of which `models` compute with one. Every method is collective."""

    def __init__(
        self,
        models: Sequence[GPTModel],
        teachers: Sequence[Teacher],
        max_resident: int | None = None,
        max_offloaded: int | None = None,
    ) -> None:
        self._models = models
        self._teachers = {teacher.name: teacher for teacher in teachers}
        self._max_resident, self._max_offloaded = max_resident, max_offloaded
        self._tensors: Shard = [
            tensor for m in models for tensor in (*m.parameters(), *(buffer for _, buffer in persistent_buffers(m)))
        ]
        self._spare: list[Shard] = [[tensor.data for tensor in self._tensors]]
        self._resident: OrderedDict[str, Shard] = OrderedDict()
        self._host: OrderedDict[str, Shard] = OrderedDict()
        self._checksums: dict[str, list[int]] = {}
        self.current: str | None = None

    @property
    def resident(self) -> tuple[str, ...]:
        """Teachers whose weights are on the device, the least recently used first."""
        return tuple(self._resident)

    @property
    def offloaded(self) -> tuple[str, ...]:
        """Teachers of which host memory has a copy."""
        return tuple(self._host)

    def load_all(self) -> None:
        """Read every teacher once, so that a bad one is refused before the first request."""
        for name in self._teachers:
            self.switch_to(name)

    @torch.no_grad()
    def switch_to(self, name: str) -> None:
        """Make the models compute with the weights of a teacher. UserError where its files cannot be read again."""
        if name == self.current:
            return
        if name in self._resident:
            self._resident.move_to_end(name)
        else:
            self.current = None
            copies = self._host.get(name)
            buffers = self._take_buffers(name)
            if copies is None:
                self._read(self._teachers[name], buffers)
            else:
                _copy(copies, buffers)
            self._resident[name] = buffers
        self._point_to(self._resident[name])
        self.current = name

    def _take_buffers(self, coming: str) -> Shard:
        """Tensors on the device for one more teacher."""
        if self._spare:
            return self._spare.pop()
        if self._max_resident is None or len(self._resident) < self._max_resident:
            return [torch.empty_like(tensor, requires_grad=False) for tensor in self._tensors]
        name, buffers = self._resident.popitem(last=False)
        self._offload(name, buffers, coming)
        return buffers

    def _offload(self, name: str, shard: Shard, coming: str) -> None:
        if name not in self._host:
            self._host[name] = [torch.empty_like(t, device="cpu", pin_memory=device.HAS_GPU) for t in shard]
            _copy(shard, self._host[name])
        self._host.move_to_end(name)
        while self._max_offloaded is not None and len(self._host) > self._max_offloaded:
            on_device = (other for other in self._host if other in self._resident or other == coming)
            del self._host[next(on_device, next(iter(self._host)))]

    def _read(self, teacher: Teacher, buffers: Shard) -> None:
        """Fill the buffers from the teacher's files. Where one rank cannot, all raise its error."""
        self._point_to(buffers)
        problem = None
        try:
            if teacher.megatron_checkpoint is None:
                weights.load_hf(self._models, teacher.checkpoint)
            else:
                checkpoint.load_into(self._models, teacher.megatron_checkpoint)
                if (rule := _rule_of(teacher.megatron_checkpoint)) is not None:  # it is taught as it was trained
                    put_on_grid(self._models, rule)
            checksums = [_checksum(tensor) for tensor in buffers]
            if self._checksums.setdefault(teacher.name, checksums) != checksums:
                problem = "its files hold other weights than when the service started; start the service again"
        except UserError as error:
            problem = str(error)
        problems: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        if found := next(filter(None, problems), None):
            self._spare.append(buffers)
            raise UserError(f"teacher {teacher.name}: {found}")

    def _point_to(self, shard: Shard) -> None:
        for tensor, data in zip(self._tensors, shard, strict=True):
            tensor.data = data


def has_quantized_experts(teacher: Teacher) -> bool:
    """A Megatron checkpoint says it; the weights of a folder are on the grid of MXFP4, whoever put them there."""
    if teacher.megatron_checkpoint is not None:
        return _rule_of(teacher.megatron_checkpoint) is not None
    checkpoint = weights.Checkpoint(teacher.checkpoint)
    experts = map(checkpoint.tensor, (name for name in sorted(checkpoint.file_of) if EXPERT.fullmatch(name)))
    first = next((weight for weight in experts if weight.any()), None)
    return first is not None and is_on_grid(first)


def _rule_of(megatron_checkpoint: Path) -> Rule | None:
    served = read_facts(megatron_checkpoint).get(QUANTIZATION, {})
    return served["rule"] if served.get("experts") == "mxfp4" else None


def _copy(source: Shard, target: Shard) -> None:
    for from_, to in zip(source, target, strict=True):
        to.copy_(from_, non_blocking=True)  # one stream: in the order in which they are asked for


def _checksum(tensor: Tensor) -> int:
    """Of the bits; not of their order, which no training run keeps while it changes the weights."""
    return int(tensor.view(_INTEGER_OF[tensor.element_size()]).sum(dtype=torch.int64))
