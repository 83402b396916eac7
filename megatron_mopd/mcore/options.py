"""The `megatron:` table: Megatron-Core's own option names, sorted by the part of Megatron that they belong to.

The names are read from the source of the installed Megatron-Core without importing it, so that preflight refuses a
misspelt one before torch is loaded, and a newer Megatron brings its own options.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megatron_mopd.errors import UserError
from megatron_mopd.mcore.families import family_of

_OURS = {
    "params_dtype": "megatron.bf16",
    "pipeline_dtype": "megatron.bf16",
    "fp16": "megatron.bf16",
    **dict.fromkeys(("activation_func", "num_layers", "hidden_size", "num_attention_heads"), "the checkpoint"),
    **dict.fromkeys(("num_query_groups", "kv_channels", "ffn_hidden_size", "num_moe_experts"), "the checkpoint"),
    **dict.fromkeys(("moe_layer_freq", "moe_ffn_hidden_size"), "the checkpoint"),
    "mtp_num_layers": "a model without multi-token prediction",
    "calculate_per_token_loss": "the objective, whose token weights are added",
    "overlap_moe_expert_parallel_comm": "the log-prob head, which it bypasses",
    "defer_embedding_wgrad_compute": "the log-prob head, which it bypasses",
    "cross_entropy_loss_fusion": "the log-prob head, which it bypasses",
    "cross_entropy_fusion_impl": "the log-prob head, which it bypasses",
    "num_distributed_optimizer_instances": "data parallelism, which has one",
    "moe_enable_routing_replay": "rollout.router_replay",
    "use_megatron_fsdp": "megatron.use_distributed_optimizer",
    "max_lr": "megatron.lr",
    "use_checkpoint_opt_param_scheduler": "this configuration, also when a run continues",
    "override_opt_param_scheduler": "this configuration, also when a run continues",
}
"""Keys that the table may not set, and what says it instead."""

_STYLES = {
    "lr_decay_style": ("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    "lr_wsd_decay_style": ("linear", "cosine", "exponential", "minus_sqrt", None),
    "wd_incr_style": ("constant", "linear", "cosine"),
}
"""What OptimizerParamScheduler knows; it would refuse others only at the first step that needs them."""

_WITHOUT_REPLAY = {
    "moe_router_fusion": (True,),
    "moe_router_load_balancing_type": ("sinkhorn",),
    "cuda_graph_impl": ("local", "transformer_engine"),
    "enable_cuda_graph": (True,),
    "external_cuda_graph": (True,),
}
"""Values with which routers do not ask for the experts to replay."""

_PLAIN_TYPES: dict[str, Any] = {"int": int, "float": int | float, "bool": bool, "str": str}
"""Annotations of upstream that a value of the table is checked against; the others are left to upstream."""


@dataclass(frozen=True)
class MegatronTable:
    """The table by the part of Megatron that each key belongs to; a key of two parts is in both."""

    transformer: dict[str, Any]
    """TransformerConfig, or MLATransformerConfig with `multi_latent_attention: true`."""
    optimizer: dict[str, Any]
    """OptimizerConfig."""
    ddp: dict[str, Any]
    """DistributedDataParallelConfig."""
    scheduler: dict[str, Any]
    """Arguments of OptimizerParamScheduler."""


def split_megatron_table(table: Mapping[str, Any]) -> MegatronTable:
    """Sort the user's keys by owner. UserError for a key that no part of Megatron has, and for one that is ours."""
    owners = {
        "transformer": _transformer_fields(bool(table.get("multi_latent_attention"))),
        "optimizer": _fields("optimizer/optimizer_config.py", "OptimizerConfig"),
        "ddp": _fields("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),
        "scheduler": _arguments("optimizer_param_scheduler.py", "OptimizerParamScheduler"),
    }
    type_of = {key: annotation for keys in owners.values() for key, annotation in keys.items()}
    known = sorted(type_of.keys() - _OURS)
    for key, value in table.items():
        if key in _OURS:
            raise UserError(f"megatron.{key} cannot be set: it follows from {_OURS[key]}; remove it")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise UserError(f"unknown key megatron.{key}" + (f"; did you mean {near[0]}?" if near else ""))
        _check_type(key, value, type_of[key])
    return MegatronTable(**{name: {k: table[k] for k in table if k in keys} for name, keys in owners.items()})


def _check_type(key: str, value: object, annotation: str) -> None:
    """Upstream's dataclasses take anything, and fail where it is used."""
    name = annotation.removesuffix(" | None").removeprefix("Optional[").removesuffix("]")
    if value is None or name not in _PLAIN_TYPES:
        return
    if not isinstance(value, _PLAIN_TYPES[name]) or isinstance(value, bool) != (name == "bool"):
        raise UserError(f"megatron.{key}={reprlib.repr(value)} must be of type {name}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"megatron.{key}={value} must be finite")


def check_schedule(table: MegatronTable, num_steps: int) -> None:
    """UserError where the warm-up does not end before the schedule does."""
    warmup, decay = table.scheduler.get("lr_warmup_steps") or 0, table.scheduler.get("lr_decay_steps", num_steps + 1)
    if not 0 <= warmup < decay:
        raise UserError(
            f"megatron.lr_warmup_steps={warmup} does not fit a schedule of {decay} steps (megatron.lr_decay_steps, by "
            "default run.num_steps + 1); lower it"
        )


def check_optimizer_options(table: MegatronTable) -> None:
    """UserError where a learner cannot be made of the table."""
    if table.optimizer.get("lr") is None:
        raise UserError("megatron.lr is missing; set the learning rate")
    for key in ("lr", "min_lr", "weight_decay", "clip_grad"):
        if (value := table.optimizer.get(key) or 0.0) < 0:
            raise UserError(f"megatron.{key}={value} must not be negative")
    if (name := table.optimizer.get("optimizer", "adam")) not in ("adam", "sgd"):
        raise UserError(f"megatron.optimizer={name!r} is not supported; supported: adam, sgd")
    for key, styles in _STYLES.items():
        if (style := table.scheduler.get(key, styles[0])) not in styles:
            raise UserError(f"megatron.{key}={style!r} is not supported; supported: {', '.join(filter(None, styles))}")
    if table.scheduler.get("lr_decay_style") == "WSD":
        for key in ("wsd_decay_steps", "lr_wsd_decay_style"):
            if table.scheduler.get(key) is None:
                raise UserError(f"megatron.lr_decay_style=WSD needs megatron.{key}; set it")


def check_router_replay(table: MegatronTable, hf_config: Mapping[str, Any]) -> None:
    """UserError where no router would ask for the experts to replay."""
    if not family_of(hf_config).architecture(hf_config).transformer.get("num_moe_experts"):
        raise UserError("rollout.router_replay: the student has no experts; remove the option")
    for key, values in _WITHOUT_REPLAY.items():
        if (value := table.transformer.get(key)) in values:
            raise UserError(
                f"megatron.{key}={value!r} chooses experts without rollout.router_replay; remove one of the two"
            )


def _transformer_fields(latent_attention: bool) -> dict[str, str]:
    file = "transformer/transformer_config.py"
    fields = _fields("model_parallel_config.py", "ModelParallelConfig") | _fields(file, "TransformerConfig")
    return fields | _fields(file, "MLATransformerConfig") if latent_attention else fields


def _fields(file: str, name: str) -> dict[str, str]:
    """The annotated names of a dataclass with their annotations, those of its bases not included."""
    return {
        node.target.id: ast.unparse(node.annotation)
        for node in _class(file, name).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def _arguments(file: str, name: str) -> dict[str, str]:
    """The argument names of a class's constructor with their annotations, but for `self` and the first."""
    (init,) = (n for n in _class(file, name).body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    return {a.arg: ast.unparse(a.annotation) if a.annotation else "" for a in init.args.args[2:]}


@cache
def _class(file: str, name: str) -> ast.ClassDef:
    tree = ast.parse((_megatron_core() / file).read_text(encoding="utf-8"))
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return found


def _megatron_core() -> Path:
    """The folder of megatron.core; `megatron` is a namespace package, so finding it imports nothing."""
    spec = importlib.util.find_spec("megatron")
    for folder in spec.submodule_search_locations or () if spec else ():
        if (core := Path(folder) / "core").is_dir():
            return core
    raise UserError("megatron-core is not installed; run pip install megatron-core")
