"""Low precision of Transformer Engine: which card can do it, and which layers stay out of it.

The recipes are Megatron-Core's options (megatron.fp8, fp8_recipe, fp4, fp4_recipe) and TransformerEngine's
implementations; nothing of them runs on a CPU. There is no MXFP4 recipe: experts in MXFP4 (quantized_experts.py) are
multiplied in bfloat16 with weights that have MXFP4 values, as servers do that have no MXFP4 matrix units, so they are
kept out of any recipe.

What is tested where: what we pass and what we refuse, without a GPU, tests/unit/test_precision.py; that a grouped layer
of Transformer Engine multiplies with these weights and hands back their gradient, tests/gpu/test_grouped_experts.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_mopd.errors import UserError
from megatron_mopd.mcore import device  # noqa: F401

# isort: split
from megatron.core.quantization.quant_config import GlobMatcher, RecipeConfig
from megatron.core.quantization.utils import load_quantization_recipe

FP8_RECIPES = {"delayed": (8, 9), "tensorwise": (8, 9), "custom": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}
FP4_RECIPES = {"nvfp4": (10, 0), "custom": (10, 0)}
"""Name to the least compute capability, from TransformerEngine's check_fp8_support and its siblings."""

_EXPERTS = "*.mlp.experts.*"
_BFLOAT16 = "experts_in_bfloat16"
_BFLOAT16_RECIPE = {
    "transformer_engine_config_type": "TEQuantizationParams",
    "training_recipe": {"override_quantized_autocast": True},
}
"""Neither an FP8 nor an FP4 recipe: the layer leaves the autocast of the others."""


def check_precision(table: Mapping[str, Any], capability: tuple[int, int]) -> None:
    """UserError where the table of `megatron:` asks a card of that compute capability for what it cannot do."""
    for key, recipes, default in (("fp8", FP8_RECIPES, "delayed"), ("fp4", FP4_RECIPES, "nvfp4")):
        if not table.get(key):
            continue
        recipe = table.get(f"{key}_recipe", default)
        if recipe not in recipes:
            raise UserError(f"megatron.{key}_recipe={recipe!r} is unknown; choose from {', '.join(recipes)}")
        if capability < recipes[recipe]:
            able = [name for name, least in recipes.items() if capability >= least and name != "custom"]
            instead = f"set megatron.{key}_recipe={' or '.join(able)}" if able else f"remove megatron.{key}"
            needed, has = ".".join(map(str, recipes[recipe])), ".".join(map(str, capability))
            raise UserError(
                f"megatron.{key}_recipe={recipe} needs a GPU of compute capability {needed}, this one has {has}; "
                f"{instead}"
            )


def quant_recipe(table: Mapping[str, Any], with_quantized_experts: bool) -> RecipeConfig | None:
    """Of single layers, None where all are alike. `megatron.quant_recipe` is the path of a file of Megatron-Core's."""
    path = table.get("quant_recipe")
    if path is not None and not Path(path).is_file():
        raise UserError(f"megatron.quant_recipe={path!r}: no such file; name a file of Megatron-Core's RecipeConfig")
    recipe = None if path is None else load_quantization_recipe(str(path))
    if not with_quantized_experts or not (table.get("fp8") or table.get("fp4") or recipe):
        return recipe
    matchers = [GlobMatcher(_EXPERTS, _BFLOAT16), *(recipe.matchers if recipe else ())]
    return RecipeConfig(matchers, {**(recipe.configs if recipe else {}), _BFLOAT16: _BFLOAT16_RECIPE})
