"""Megatron's gradient buffers, optimizer and learning-rate schedule around the model chunks of a rank.

Options come from the `megatron:` table under Megatron's names. Defaults of ours: the distributed optimizer is on,
gradients are reduced in float32, the learning rate is constant after warm-up.

The schedule is read before a step, not after it as in Megatron's own loop: with `lr_warmup_steps: w` step k <= w runs
at k / w of the rate, and none at zero. `lr_decay_steps` is by default the number of steps plus one, so that the last
one still learns.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

from megatron_mopd.errors import UserError
from megatron_mopd.mcore.options import MegatronTable

# isort: split
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module


def wrap(models: Sequence[GPTModel], table: MegatronTable) -> list[DistributedDataParallel]:
    """Give each chunk its gradient buffers and the hooks that reduce them; sets the callbacks of its config."""
    config = models[0].config
    ddp_config = _construct(
        DistributedDataParallelConfig, {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True, **table.ddp}
    )
    chunks = [
        # Buckets overlap communication with the backward pass; only the first chunk's gradients come last.
        DistributedDataParallel(
            config, ddp_config, Float16Module(config, model) if config.bf16 else model, disable_bucketing=i > 0
        )
        for i, model in enumerate(models)
    ]
    callbacks: dict[str, list[Any]] = {}
    if ddp_config.overlap_grad_reduce:
        callbacks["no_sync_func"] = [chunk.no_sync for chunk in chunks]
    if ddp_config.overlap_param_gather and ddp_config.align_param_gather:
        callbacks["param_sync_func"] = [chunk.start_param_sync for chunk in chunks]
    for name, of_chunks in callbacks.items():
        setattr(config, name, of_chunks[0] if len(chunks) == 1 else of_chunks)  # as the schedules expect them
    config.finalize_model_grads_func = finalize_model_grads
    return chunks


def build_optimizer(
    chunks: Sequence[DistributedDataParallel], table: MegatronTable, num_steps: int
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """A fresh optimizer over the chunks' weights as they are now, and its schedule at step 0."""
    model_config, ddp_config = chunks[0].config, chunks[0].ddp_config
    options = {
        "min_lr": 0.0,
        **table.optimizer,
        "bf16": model_config.bf16,
        "params_dtype": model_config.params_dtype,
        "use_distributed_optimizer": ddp_config.use_distributed_optimizer,
        "overlap_param_gather": ddp_config.overlap_param_gather,
    }
    config = _construct(OptimizerConfig, options)
    optimizer = get_megatron_optimizer(config, list(chunks))
    schedule = {
        "init_lr": 0.0,
        "max_lr": config.lr,
        "min_lr": config.min_lr,
        "lr_warmup_steps": 0,
        "lr_decay_steps": num_steps + 1,
        "lr_decay_style": "constant",
        "start_wd": config.weight_decay,
        "end_wd": config.weight_decay,
        "wd_incr_steps": num_steps,
        "wd_incr_style": "constant",
        **table.scheduler,
    }
    return optimizer, _construct(OptimizerParamScheduler, {"optimizer": optimizer, **schedule})


def _construct(cls: Any, options: dict[str, Any]) -> Any:
    try:
        return cls(**options)
    except (ValueError, TypeError, AssertionError) as error:  # upstream checks by assertion, some without a message
        reason = " ".join(str(error).split()) or traceback.extract_tb(error.__traceback__)[-1].line
        raise UserError(f"megatron: {cls.__name__} refuses its options: {reason}") from error
