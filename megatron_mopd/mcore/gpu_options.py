"""Options of Megatron-Core that need a GPU, and the recipes of Transformer Engine that need a new one.

The recipes are Megatron-Core's options (megatron.fp8, fp8_recipe, fp4, fp4_recipe). There is none for MXFP4: experts in
MXFP4 leave them all, see mcore/precision.py.

Torch-free, so that preflight refuses what this machine cannot do. What no one can tell before torch is loaded (drivers
without nvidia-smi, GPUs of others) is left to mcore/model.py, which asks the card itself.
Promises (tests/unit/test_gpu_options.py): what is refused names what would work.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_mopd.doctor import output
from megatron_mopd.errors import UserError

Capability = tuple[int, int]
"""NVIDIA's compute capability, for example (9, 0)."""

GPU_FIELDS = {
    "moe_grouped_gemm": True,
    "moe_permute_fusion": True,
    "apply_rope_fusion": True,
    "bias_activation_fusion": True,
    "bias_dropout_fusion": True,
}
"""What Megatron-Core is given on a GPU."""
_NEEDS_GPU = (
    *GPU_FIELDS,
    "masked_softmax_fusion",
    "persist_layer_norm",
    "gradient_accumulation_fusion",
    "moe_router_fusion",
    "fp8",
    "fp4",
    "quant_recipe",
)
FP8_RECIPES = {"delayed": (8, 9), "tensorwise": (8, 9), "custom": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}
FP4_RECIPES = {"nvfp4": (10, 0), "custom": (10, 0)}
"""Name to the least compute capability, from TransformerEngine's check_fp8_support and its siblings."""
_RECIPES = (("fp8", FP8_RECIPES, "delayed"), ("fp4", FP4_RECIPES, "nvfp4"))

OTHER_WEIGHTS = (
    *("fp8_param", "fp8_param_gather", "fp4_param"),
    *("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"),
)
"""Options with which layers multiply with weights that were made at another time."""


def check_here(table: Mapping[str, Any]) -> None:
    """UserError where this machine, as far as can be told, cannot do what the table of `megatron:` asks for."""
    check_recipes(table)
    if any(table.get(key) for key in _NEEDS_GPU) and (gpus := visible_gpus()) is not None:
        check_gpu(table, max(gpus, default=None))


def check_gpu(table: Mapping[str, Any], capability: Capability | None) -> None:
    """UserError where a GPU of that capability, or a machine without one (None), cannot do what the table asks for."""
    check_recipes(table)
    if capability is None:
        for key in _NEEDS_GPU:
            if table.get(key):
                raise UserError(f"megatron.{key}={table[key]!r} needs a GPU, and there is none here; remove it")
        return
    for key, recipes, default in _RECIPES:
        recipe = table.get(f"{key}_recipe", default)
        if table.get(key) and capability < recipes[recipe]:
            able = [name for name, least in recipes.items() if capability >= least and name != "custom"]
            instead = f"set megatron.{key}_recipe={' or '.join(able)}" if able else f"remove megatron.{key}"
            needed, has = (".".join(map(str, version)) for version in (recipes[recipe], capability))
            raise UserError(
                f"megatron.{key}_recipe={recipe} needs a GPU of compute capability {needed}, this one has {has}; "
                f"{instead}"
            )


def check_recipes(table: Mapping[str, Any]) -> None:
    """UserError for a recipe that Megatron-Core does not have, and for a file of recipes that is not there."""
    for key, recipes, default in _RECIPES:
        if table.get(key) and (recipe := table.get(f"{key}_recipe", default)) not in recipes:
            raise UserError(f"megatron.{key}_recipe={recipe!r} is unknown; choose from {', '.join(recipes)}")
    if (path := table.get("quant_recipe")) is not None and not Path(path).is_file():
        raise UserError(f"megatron.quant_recipe={path!r}: no such file; name a file of Megatron-Core's RecipeConfig")


def check_teachers_options(table: Mapping[str, Any]) -> None:
    """UserError for options of `service.megatron` with which a score would depend on what was scored before."""
    if table.get("fp8") and table.get("fp8_recipe", "delayed") == "delayed":
        raise UserError(
            "megatron.fp8 needs a fp8_recipe that scales by the values at hand (tensorwise, blockwise, mxfp8); the "
            "default, delayed, scales by those of earlier batches"
        )
    for key in OTHER_WEIGHTS:
        if table.get(key) not in (None, False, "none"):
            raise UserError(f"megatron.{key}={table[key]!r} does not go with teachers that take turns; remove it")


def visible_gpus() -> Sequence[Capability] | None:
    """Of the GPUs of this machine, none where this process may use none; None where that cannot be told."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return []
    listed = output(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"])
    if listed is None:
        return None if any(map(_exists, _DEVICES)) else []
    return [(int(major), int(minor)) for major, _, minor in (line.strip().partition(".") for line in listed.split())]


_DEVICES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg")
"""A GPU's files: of Linux, of AMD, of Windows' subsystem."""


def _exists(pattern: str) -> bool:
    return any(Path("/").glob(pattern.removeprefix("/")))
