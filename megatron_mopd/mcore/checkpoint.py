"""Checkpoints of the learner: weights, optimizer, random states and step, in Megatron's distributed format.

    RUN/checkpoints/latest                  name of the newest one
    RUN/checkpoints/step_00000050/          Megatron's files, and learner.json (step, layout, processes, teachers)

Promises (tests/distributed/test_checkpoint.py): a checkpoint is there whole or not at all (written beside, synced,
renamed, then named in `latest`); at the same layout, save, kill and load equals never stopping, bit for bit on a CPU;
the weights alone load at any layout. Optimizer state is kept as each data-parallel rank has it: saved without
communication.
"""

from __future__ import annotations

import os
import queue
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_mopd.errors import UserError
from megatron_mopd.mcore import device
from megatron_mopd.mcore.learner import Learner
from megatron_mopd.resume import (
    QUANTIZATION,
    TEACHERS,
    TRACKER_FILE,
    check_place,
    facts,
    latest,
    read_facts,
    teacher_facts,
    write_facts,
)

# isort: split
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker

_METADATA = {"distrib_optim_sharding_type": "dp_reshardable"}

__all__ = ["latest", "load", "load_into", "load_weights", "save"]

# Upstream passes results of its writers through a manager process, for saves that end in the background. Ours do not,
# and a process that outlives the save would only be in the way of a clean end.
filesystem_async._results_queue = queue.Queue()


def save(learner: Learner, folder: Path, keep: int) -> Path:
    """Write `folder`/step_XXXXXXXX, name it in `latest`, and remove all but the newest `keep`. Collective."""
    target = folder / f"step_{learner.step:08d}"
    partial = folder / f".{target.name}.partial"
    is_first = dist.get_rank() == 0
    if is_first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    learner.sync_params()
    dist_checkpointing.save(_state(learner, is_loading=False), str(partial), content_metadata=_METADATA)
    if is_first:
        quantization = learner.config.quantization.model_dump(include={"experts", "rule"})
        of_teachers = teacher_facts(learner.config.teachers.models)
        write_facts(partial, {**_facts(learner), TEACHERS: of_teachers, QUANTIZATION: quantization})
        _sync_files(partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        _point_to(folder, target.name)
        _prune(folder, target.name, keep)
    dist.barrier()
    return target


@torch.no_grad()
def load(learner: Learner, folder: Path) -> None:
    """Continue from a checkpoint of the same layout and number of processes. Collective.

    Raises UserError for a folder that is no checkpoint or was saved at another layout.
    """
    saved = read_facts(folder)
    check_place(folder, saved, _facts(learner))
    assert isinstance(learner.optimizer, ChainedOptimizer)
    for optimizer in learner.optimizer.chained_optimizers:
        if isinstance(optimizer, DistributedOptimizer):
            optimizer._init_optimizer_states_with_dummy_values()  # state_dict() of a fresh torch optimizer is empty
    content = _load(_state(learner, is_loading=True), folder)
    _set_weights(learner.models, content)
    learner.optimizer.load_state_dict(content["optimizer"])
    _set_rng(content["rng"])
    learner.resume_at(saved["step"])


def load_weights(learner: Learner, folder: Path) -> None:
    """The weights alone, from a checkpoint of any layout: step 0, fresh optimizer. Collective."""
    load_into(learner.models, folder)
    learner.reset_optimizer()


@torch.no_grad()
def load_into(models: Sequence[GPTModel], folder: Path) -> None:
    """The weights alone, from a checkpoint of any layout, into the bare models of this rank. Collective.

    Raises UserError for a folder that is no checkpoint of this project, or holds another model.
    """
    read_facts(folder)
    _set_weights(models, _load(_weights(models), folder))


def _state(learner: Learner, is_loading: bool) -> dict[str, Any]:
    weights = _weights(learner.models)
    optimizer = learner.optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=dict(_METADATA))
    rng = ShardedObject("rng", _rng(), (dist.get_world_size(),), (dist.get_rank(),))
    return {**weights, "optimizer": optimizer, "rng": rng}


def _weights(models: Sequence[GPTModel]) -> dict[str, Any]:
    # Virtual stages repeat local names (layers.0 ...): a dictionary for each.
    return {f"chunk{i}": model.sharded_state_dict(prefix="model.") for i, model in enumerate(models)}


def _set_weights(models: Sequence[GPTModel], content: dict[str, Any]) -> None:
    for i, model in enumerate(models):
        state = {name.removeprefix("model."): value for name, value in content[f"chunk{i}"].items()}
        model.load_state_dict(state)


def _load(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    try:
        content = dist_checkpointing.load(state, str(folder))
    except CheckpointingException as error:
        raise UserError(f"checkpoint {folder} does not hold this model: {' '.join(str(error).split())}") from error
    assert isinstance(content, dict)
    return content


def _rng() -> dict[str, Any]:
    states = {"torch": torch.get_rng_state(), "tracker": _tracker().get_states()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if device.HAS_GPU else {})


def _set_rng(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    _tracker().set_states(states["tracker"])
    if device.HAS_GPU:
        torch.cuda.set_rng_state(states["cuda"])


def _tracker() -> Any:
    return get_cuda_rng_tracker()


def _facts(learner: Learner) -> dict[str, Any]:
    distributed = learner.chunks[0].ddp_config.use_distributed_optimizer
    return facts(learner.step, learner.layout, dist.get_world_size(), distributed)


def _point_to(folder: Path, name: str) -> None:
    partial = folder / f".{TRACKER_FILE}.partial"
    partial.write_text(name + "\n")
    _sync(partial)
    os.replace(partial, folder / TRACKER_FILE)
    _sync(folder)


def _prune(folder: Path, newest: str, keep: int) -> None:
    """Later ones than `newest` are of a run that was taken up again before them: they do not count."""
    for old in sorted(path for path in folder.glob("step_*") if path.name <= newest)[:-keep]:
        shutil.rmtree(old)


def _sync_files(folder: Path) -> None:
    for file in folder.iterdir():
        _sync(file)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
