"""An exported folder against the weights in training, tensor by tensor, in bits (quantization/audit.py).

What is expected is made anew from the weights as they are, whole tensors instead of slices, so that the audit shares
neither layout nor cache with what it checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_mopd.config import Quantization
from megatron_mopd.errors import UserError
from megatron_mopd.hf_folder import read_hf_config
from megatron_mopd.mcore.parameters import parameters_of
from megatron_mopd.mcore.stream import HfStream
from megatron_mopd.mcore.weights import Checkpoint
from megatron_mopd.quantization.audit import problem
from megatron_mopd.quantization.policy import is_quantized

# isort: split
from megatron.core.models.gpt import GPTModel


def audit_export(models: Sequence[GPTModel], folder: Path, options: Quantization) -> None:
    """UserError on every rank where the folder is not what is trained. Collective."""
    checkpoint, parameters = Checkpoint(folder), parameters_of(models, read_hf_config(folder))
    rule = None if options.experts == "none" else options.rule
    quantized = {name for p in parameters if is_quantized(p.name) for name in p.hf_names}
    names, problems = [], []
    for name, weight in HfStream(models, folder).all():
        names.append(name)
        if name not in checkpoint.file_of:
            problems.append(f"{name} is missing")
        elif found := problem(weight.cpu(), checkpoint.tensor(name), rule if name in quantized else None):
            problems.append(f"{name} {found}")
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (names, problems))
    known = {name for of_rank, _ in of_ranks for name in of_rank}
    found = sorted(line for _, of_rank in of_ranks for line in of_rank)
    found += [f"{name} is not a tensor of this model" for name in sorted(checkpoint.file_of.keys() - known)]
    if found:
        more = f"; and {len(found) - 4} more" if len(found) > 4 else ""
        raise UserError(f"{folder} is not what is trained: {'; '.join(found[:4])}{more}; do not sample from it")
