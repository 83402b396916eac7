"""Low precision of Transformer Engine: which layers stay out of it.

The recipes are Megatron-Core's options (megatron.fp8, fp8_recipe, fp4, fp4_recipe) and TransformerEngine's
implementations; nothing of them runs on a CPU (mcore/gpu_options.py refuses it). There is no MXFP4 recipe: experts in
MXFP4, the student's (quantized_experts.py) and those of teachers that were trained so, are multiplied in bfloat16 with
weights that have MXFP4 values, as servers do that have no MXFP4 matrix units, so they are kept out of any recipe.

What is tested where: what we pass and what we refuse, without a GPU, tests/unit/test_precision.py; that a grouped layer
of Transformer Engine multiplies with these weights and hands back their gradient, tests/gpu/test_grouped_experts.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_mopd.mcore import device  # noqa: F401

# isort: split
from megatron.core.quantization.quant_config import GlobMatcher, RecipeConfig
from megatron.core.quantization.utils import load_quantization_recipe

_EXPERTS = "*.mlp.experts.*"
_BFLOAT16 = "experts_in_bfloat16"
_BFLOAT16_RECIPE = {
    "transformer_engine_config_type": "TEQuantizationParams",
    "training_recipe": {"override_quantized_autocast": True},
}
"""Neither an FP8 nor an FP4 recipe: the layer leaves the autocast of the others."""


def uses_recipes(table: Mapping[str, Any]) -> bool:
    return any(table.get(key) for key in ("fp8", "fp4", "quant_recipe"))


def quant_recipe(table: Mapping[str, Any], with_quantized_experts: bool) -> RecipeConfig | None:
    """Of single layers, None where all are alike. `megatron.quant_recipe` is the path of a file of Megatron-Core's."""
    path = table.get("quant_recipe")
    recipe = None if path is None else load_quantization_recipe(str(path))
    if not with_quantized_experts or not uses_recipes(table):
        return recipe
    matchers = [GlobMatcher(_EXPERTS, _BFLOAT16), *(recipe.matchers if recipe else ())]
    return RecipeConfig(matchers, {**(recipe.configs if recipe else {}), _BFLOAT16: _BFLOAT16_RECIPE})
