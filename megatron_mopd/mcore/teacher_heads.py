"""The teachers' output layers on a rank of the student: with them, hidden states from a teacher service become logits.

Each rank of the last pipeline stage reads its part of the vocabulary of every teacher once, into host memory, in the
checkpoint's own dtype. One at a time is copied to the device, for the tokens of its cell. Teachers are those of the
cells, so a token's teacher is that of its trajectory's cell, as the router had it.

Promises (tests/distributed/test_full_kl.py): hidden states and this layer give the log-probs that the service gives,
from a Hugging Face folder and from a Megatron checkpoint of any layout; a layer of another vocabulary is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from megatron_mopd.config import Teacher
from megatron_mopd.errors import UserError
from megatron_mopd.hf_folder import read_hf_config, read_tensors
from megatron_mopd.mcore import device
from megatron_mopd.mcore.divergence_pass import TeacherRows
from megatron_mopd.mcore.families import family_of
from megatron_mopd.mcore.head import LogprobHead
from megatron_mopd.mcore.microbatch import DeviceMicroBatch
from megatron_mopd.types import Cell

LAYER = "output_layer.weight"


class TeacherHeads:
    def __init__(self, teachers: Sequence[Teacher], head: LogprobHead) -> None:
        """Raises UserError for a teacher whose vocabulary is not the student's."""
        self.weights: Mapping[Cell, Tensor] = {teacher.cell: _read(teacher, head) for teacher in teachers}

    def rows(self, cells: Sequence[Cell], micro: DeviceMicroBatch) -> Iterator[TeacherRows]:
        """Teacher by teacher, the tokens of a micro-batch that are in the mask; at least one, maybe of no tokens."""
        at_S = micro.columns.loss_mask_T.nonzero()[:, 0]
        cell_S = micro.cell_T[at_S]
        for index in cell_S.unique().tolist() or [0]:
            weight_vD, of_cell_S = self.weights[cells[index]], cell_S == index
            hidden_SD = micro.teacher_hidden_SD
            if hidden_SD is None:  # there are no such tokens, see Learner
                hidden_SD = weight_vD.new_zeros(len(at_S), weight_vD.shape[1])
            yield TeacherRows(
                at_S[of_cell_S],
                hidden_SD[of_cell_S.cpu()].to(device.DEVICE, non_blocking=True),
                weight_vD.to(device.DEVICE, non_blocking=True),
            )


def _read(teacher: Teacher, head: LogprobHead) -> Tensor:
    """The rows of this rank's part of the vocabulary, on the host."""
    key, mine = f"teacher {teacher.name}", slice(head.vocabulary.start, head.vocabulary.stop)
    if (rows := read_hf_config(teacher.checkpoint, key)["vocab_size"]) != head.vocab_size:
        raise UserError(
            f"{key} has {rows} vocabulary rows, the student {head.vocab_size}; distributions over different "
            "vocabularies have no KL: set objective.name=mopd"
        )
    if teacher.megatron_checkpoint is None:
        weight_vD = _from_folder(teacher.checkpoint, key, mine)
    else:
        weight_vD = _from_megatron(teacher.megatron_checkpoint, key)[mine].clone()
    return weight_vD.pin_memory() if device.HAS_GPU else weight_vD


def _from_folder(folder: Path, key: str, rows: slice) -> Tensor:
    _, (name,) = family_of(read_hf_config(folder, key)).find(LAYER)
    found = {tensor.name: tensor.file for tensor in read_tensors(folder, key)}
    if name not in found:
        raise UserError(f"{key}: {folder} has no {name}")
    with safe_open(found[name], framework="pt") as opened:
        return opened.get_slice(name)[rows]


def _from_megatron(folder: Path, key: str) -> Tensor:
    """The whole layer, with whatever padding it was saved with. Each rank reads for itself."""
    name = f"model.{LAYER}"
    reader = FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata.get(name)
    if not isinstance(stored, TensorStorageMetadata):
        raise UserError(f"{key}: {folder} has no {name}; it must be a checkpoint of this project")
    content = {name: torch.empty(stored.size, dtype=stored.properties.dtype)}
    load(content, storage_reader=reader, no_dist=True)
    return content[name]
