"""What is asked of Megatron-Core and Transformer Engine, as far as a machine without a GPU can show it.

What is refused: test_gpu_options.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tiny import write_checkpoint

CASES = """
from pathlib import Path
import sys
from megatron_mopd.mcore.gpu_options import FP4_RECIPES, FP8_RECIPES
from megatron_mopd.mcore.precision import quant_recipe

# isort: split
import typing
from megatron.core.extensions.transformer_engine import TEQuantizationParams
from megatron.core.quantization.utils import get_quant_config_or_none
from megatron.core.transformer.transformer_config import TransformerConfig

# The names are Megatron-Core's.
fields = TransformerConfig.__dataclass_fields__
assert {"fp8", "fp8_recipe", "fp4", "fp4_recipe", "quant_recipe"} <= fields.keys()
(literal, _) = typing.get_args(typing.get_type_hints(TransformerConfig)["fp8_recipe"])
assert set(typing.get_args(literal)) == FP8_RECIPES.keys()
(literal, _) = typing.get_args(typing.get_type_hints(TransformerConfig)["fp4_recipe"])
assert set(typing.get_args(literal)) == FP4_RECIPES.keys()

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
"""

CONFIGURATIONS = """
import ast
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from megatron_mopd.mcore import device, model
from megatron_mopd.mcore.gpu_options import GPU_FIELDS

# isort: split
import torch
from megatron.core import fp4_utils, fp8_utils, utils
from packaging.version import Version

class Recorded:
    # What a recipe of Transformer Engine was made with.
    def __init__(self, name):
        self.name = name
    def __call__(self, **arguments):
        arguments.pop("config", None)
        return self.name, arguments

recipes = ("Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling")
formats = SimpleNamespace(E4M3="E4M3", HYBRID="HYBRID")
recipe = SimpleNamespace(Format=formats, **{name: Recorded(name) for name in recipes})
names = {
    "transformer_engine": SimpleNamespace(common=SimpleNamespace(recipe=recipe)),
    "TEDelayedScaling": Recorded("TEDelayedScaling"),
    "is_te_min_version": lambda version: True,
}

def of_megatron(module, name):
    # The function that Megatron-Core defines where there is a Transformer Engine.
    tree = ast.parse(Path(module.__file__).read_text())
    found = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)
    scope = {**vars(module), **names}
    exec(compile(ast.Module([found], []), module.__file__, "exec"), scope)
    return scope[name]

hf_config = json.loads(Path(sys.argv[1]).read_text())

def passed(**table):
    # The recipe that Megatron-Core makes of our configuration, on a card that can do all of them.
    find = importlib.util.find_spec
    with (
        patch.object(device, "HAS_GPU", True),
        patch.object(utils, "_te_version", Version("2.20")),
        patch.object(torch.cuda, "get_device_capability", lambda: (10, 0)),
        patch.object(importlib.util, "find_spec", lambda name: name if name == "transformer_engine" else find(name)),
    ):
        table |= dict.fromkeys(GPU_FIELDS, False)  # upstream refuses them where their kernels are absent
        config = model.transformer_config(table, hf_config, with_quantized_experts=True)
    assert config.quant_recipe.matchers[0].pattern == "*.mlp.experts.*"
    make = of_megatron(fp4_utils, "get_fp4_recipe") if config.fp4 else of_megatron(fp8_utils, "get_fp8_recipe")
    return make(config)

e4m3 = {"fp8_format": "E4M3"}
assert passed(fp8="e4m3") == ("TEDelayedScaling", {**e4m3, "override_linear_precision": (False, False, False)})
assert passed(fp8="e4m3", fp8_recipe="tensorwise") == ("Float8CurrentScaling", {**e4m3, "fp8_dpa": False})
assert passed(fp8="e4m3", fp8_recipe="blockwise") == ("Float8BlockScaling", e4m3)
assert passed(fp8="e4m3", fp8_recipe="mxfp8") == ("MXFP8BlockScaling", e4m3)
assert passed(fp8="hybrid", fp8_recipe="mxfp8") == ("MXFP8BlockScaling", {"fp8_format": "HYBRID"})
assert passed(fp4="e2m1") == passed(fp4="e2m1", fp4_recipe="nvfp4") == ("NVFP4BlockScaling", {})
"""


def passes(script: Path, code: str, *arguments: Path) -> None:
    """In a process of its own, which imports Megatron."""
    script.write_text(code)
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_experts_leave_the_recipes(tmp_path: Path) -> None:
    passes(tmp_path / "recipes.py", CASES, tmp_path / "own.yaml")


def test_each_recipe_of_transformer_engine_is_made_as_it_was_asked_for(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    passes(tmp_path / "configurations.py", CONFIGURATIONS, tmp_path / "model" / "config.json")
