"""Processes to ranks: the process group, Megatron's parallel groups, seeds, and the way back.

Works under torchrun and alone (one process, no environment needed).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from megatron_mopd.errors import UserError
from megatron_mopd.mcore import device
from megatron_mopd.mcore.layout import Layout

# isort: split
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed


def init_distributed(timeout_s: float) -> None:
    """Join the process group of torchrun's environment, or make one of this process alone.

    A collective that waits longer than `timeout_s` ends the process (NCCL) or raises (gloo).
    """
    timeout = timedelta(seconds=timeout_s)
    if device.HAS_GPU:
        torch.cuda.set_device(device.DEVICE)
    if "RANK" in os.environ:
        dist.init_process_group(device.BACKEND, timeout=timeout)
    else:
        dist.init_process_group(device.BACKEND, timeout=timeout, store=HashStore(), rank=0, world_size=1)


def initialize_parallel(layout: Layout, seed: int) -> None:
    """Make Megatron's groups for `layout`, in place of those of an earlier call, and seed every generator.

    Ranks that hold the same parameters draw the same numbers; tensor-parallel regions draw their own (Megatron's
    tracker).
    """
    _leave_groups()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    torch.manual_seed(seed + 100 * parallel_state.get_pipeline_model_parallel_rank())
    model_parallel_cuda_manual_seed(seed)


def on_rank_zero(action: Callable[[], object]) -> bool:
    """Run `action` on rank 0 while the others wait for it; return on every rank whether its result is true.

    If it raises, rank 0 raises and every other rank leaves with rank 0's exit code, so that none
    waits for a dead rank.
    """
    answer = torch.zeros(2, dtype=torch.int32, device=device.DEVICE)
    try:
        if dist.get_rank() == 0:
            answer[1] = bool(action())
    except BaseException as error:
        answer[0] = 2 if isinstance(error, UserError) else 1
        raise
    finally:
        dist.broadcast(answer, src=0)
    code, result = answer.tolist()
    if code:
        raise SystemExit(code)
    return bool(result)


def shutdown() -> None:
    """Leave the groups and the process group; does nothing where there is none."""
    _leave_groups()
    if dist.is_initialized():
        dist.destroy_process_group()


def _leave_groups() -> None:
    """Megatron forgets its groups without ending them, and each holds sockets and threads (51 a layout on gloo)."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        for group in list(dist.distributed_c10d._world.pg_map):
            if group != dist.group.WORLD:  # Megatron ends only some of its own
                dist.destroy_process_group(group)
