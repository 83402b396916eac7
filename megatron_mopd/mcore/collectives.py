"""How what one rank knows of a batch reaches all: over data and context parallelism, then along the pipeline."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mopd.mcore import device  # noqa: F401

# isort: split
from megatron.core import parallel_state


def gather_over_data(tensor: Tensor) -> Tensor:
    """[ranks, ...]: the tensor of every data- and context-parallel rank, in rank order."""
    group = _data_group()
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor, group=group)
    return torch.stack(parts)


def sum_over_data(tensor: Tensor) -> None:
    """Add the tensors of the data- and context-parallel ranks, in place."""
    dist.all_reduce(tensor, group=_data_group())


def from_last_stage(tensor: Tensor) -> None:
    """Overwrite the tensor with that of the last pipeline stage."""
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        group = parallel_state.get_pipeline_model_parallel_group()
        assert isinstance(group, dist.ProcessGroup)
        dist.broadcast(tensor, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)


def _data_group() -> dist.ProcessGroup:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    assert isinstance(group, dist.ProcessGroup)
    return group
