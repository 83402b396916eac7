"""What is asked of Transformer Engine, and what is refused, as far as a machine without a GPU can show it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CASES = """
from pathlib import Path
import sys
from megatron_mopd.errors import UserError
from megatron_mopd.mcore.precision import FP8_RECIPES, check_precision, quant_recipe

# isort: split
import typing
from megatron.core.extensions.transformer_engine import TEQuantizationParams
from megatron.core.quantization.utils import get_quant_config_or_none
from megatron.core.transformer.transformer_config import TransformerConfig

def refusal(table, capability):
    try:
        check_precision(table, capability)
    except UserError as error:
        return str(error)

assert refusal({}, (7, 0)) is None
for recipe, least in FP8_RECIPES.items():
    assert refusal({"fp8": "e4m3", "fp8_recipe": recipe}, least) is None
    assert "needs a GPU of compute capability" in refusal({"fp8": "e4m3", "fp8_recipe": recipe}, (8, 0))
assert refusal({"fp8": "hybrid"}, (8, 0)).endswith("this one has 8.0; remove megatron.fp8")
assert "set megatron.fp8_recipe=delayed or tensorwise or blockwise" in refusal(
    {"fp8": "e4m3", "fp8_recipe": "mxfp8"}, (9, 0))
assert "nvfp4 needs a GPU of compute capability 10.0" in refusal({"fp4": "e2m1"}, (9, 0))
assert "unknown; choose from delayed" in refusal({"fp8": "e4m3", "fp8_recipe": "mxfp4"}, (10, 0))

# The names are Megatron-Core's.
fields = TransformerConfig.__dataclass_fields__
assert {"fp8", "fp8_recipe", "fp4", "fp4_recipe", "quant_recipe"} <= fields.keys()
(literal, _) = typing.get_args(typing.get_type_hints(TransformerConfig)["fp8_recipe"])
assert set(typing.get_args(literal)) == FP8_RECIPES.keys()

# Experts leave the recipe, whatever else does; other layers do not.
assert quant_recipe({"fp8": "e4m3"}, False) is None
assert quant_recipe({}, True) is None
own = Path(sys.argv[1])
own.write_text('''
matchers:
  attention: {type: glob, enabled: true, pattern: "*self_attention*", config: mxfp8}
  all: {type: glob, enabled: true, pattern: "*", config: mxfp8}
configs:
  mxfp8: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {fp8_quantization_recipe: mxfp8}}
''')
for recipe in (quant_recipe({"fp8": "e4m3"}, True), quant_recipe({"quant_recipe": str(own)}, True)):
    experts = get_quant_config_or_none("decoder.layers.3.mlp.experts.linear_fc1", recipe)
    training = TEQuantizationParams.parse_from_config(experts).training_recipe
    assert training.fp8_quantization_recipe is None and training.fp4_quantization_recipe is None
    assert training.override_quantized_autocast
    shared = get_quant_config_or_none("decoder.layers.3.mlp.shared_experts.linear_fc1", recipe)
    attention = get_quant_config_or_none("decoder.layers.3.self_attention.linear_qkv", recipe)
    if recipe.matchers[1:]:
        assert TEQuantizationParams.parse_from_config(attention).training_recipe.fp8_quantization_recipe == "mxfp8"
        assert shared is not None
    else:
        assert attention is None and shared is None
try:
    quant_recipe({"quant_recipe": "nowhere.yaml"}, True)
except UserError as error:
    assert "no such file" in str(error)
else:
    raise AssertionError("not refused")
"""


def test_recipes_are_refused_or_passed_as_megatron_takes_them(tmp_path: Path) -> None:
    """In a process of its own, which imports Megatron."""
    script = tmp_path / "recipes.py"
    script.write_text(CASES)
    done = subprocess.run([sys.executable, script, tmp_path / "own.yaml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
