"""How checkpoints store MXFP4 weights of routed experts, and what their config.json says of it.

    compressed-tensors   experts.E.gate_proj.weight_packed   uint8 [out, in/2]
                         experts.E.gate_proj.weight_scale    uint8 [out, in/32]; so for up_proj and down_proj
    gpt-oss              experts.gate_up_proj_blocks         uint8 [experts, 2 out, in/32, 16]
                         experts.gate_up_proj_scales         uint8 [experts, 2 out, in/32]; rows of gate and up in turn;
                                                             so for down_proj, which is alone

Everything else keeps its type. Promises (tests/unit/test_packed_folder.py): transformers reads both; no pattern of
`ignore` matches an expert, and every other matrix is matched by one.
Source: compressed_tensors/compressors/mxfp4, transformers/integrations/mxfp4.py.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch

from megatron_mopd.quantization.formats import BLOCK, Mxfp4, Rule

Layout = Literal["compressed-tensors", "gpt-oss"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<projection>gate|up|down)_proj\.weight")
"""The weight of a routed expert, as model families name it."""
RULE_KEY = "mxfp4_rule"
"""In quantization_config, where loaders ignore it, and in the metadata of the files."""
SUFFIXES = {".weight_packed": ".weight_scale", "_blocks": "_scales"}

_PROJECTIONS: dict[str, tuple[str, ...]] = {"gate_up": ("gate", "up"), "down": ("down",)}
_IGNORE = (
    r"re:.*self_attn.*",
    r"re:.*linear_attn.*",
    r"re:.*shared_expert.*",
    r"re:.*mlp\.gate$",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    r"re:.*embed_tokens.*",
    r"re:.*lm_head.*",
)
"""Wide enough for the names that engines give to fused layers: qkv_proj, gate_up_proj."""


class Packed(NamedTuple):
    """A packed tensor, its scales, and the weights in them: `weights[expert][part]`, rows of the parts in turn."""

    packed: str
    scale: str
    weights: tuple[tuple[str, ...], ...]


def packed_of(weights: Iterable[str], layout: Layout) -> list[Packed]:
    """What the experts' weights become. Raises ValueError if an expert lacks a projection."""
    if layout == "compressed-tensors":
        return [Packed(f"{name}_packed", f"{name}_scale", ((name,),)) for name in weights]
    numbers: dict[str, set[int]] = defaultdict(set)
    names = set(weights)
    for name in names:
        if (match := EXPERT.fullmatch(name)) is not None:
            numbers[match["experts"]].add(int(match["number"]))
    found = [of_experts(experts, fused, len(of)) for experts, of in numbers.items() for fused in _PROJECTIONS]
    wanted = {name for packed in found for of_expert in packed.weights for name in of_expert}
    if missing := sorted(wanted ^ names):
        raise ValueError(f"{missing[0]} has no counterpart in the other experts")
    return found


def of_experts(experts: str, fused: str, number: int) -> Packed:
    """gate_up or down of the gpt-oss layout."""
    name = f"{experts}.{fused}_proj"
    parts = [tuple(f"{experts}.{e}.{part}_proj.weight" for part in _PROJECTIONS[fused]) for e in range(number)]
    return Packed(f"{name}_blocks", f"{name}_scales", tuple(parts))


def weights_in(name: str, shape: Sequence[int]) -> Packed | None:
    """What is in a packed tensor of that name; None if it is another tensor."""
    if name.endswith(".weight_packed"):
        weight = name.removesuffix("_packed")
        return Packed(name, f"{weight}_scale", ((weight,),))
    match = re.fullmatch(r"(.+\.experts)\.(gate_up|down)_proj_blocks", name)
    return None if match is None else of_experts(match[1], match[2], shape[0] if shape else 0)


def join(layout: Layout, codes: Sequence[Sequence[Mxfp4]]) -> Mxfp4:
    """`codes[expert][part]` as the layout's two tensors."""
    if layout == "compressed-tensors":
        ((code,),) = codes
        return code
    packed, scale = (
        torch.stack([torch.stack([code[i] for code in parts], dim=1).flatten(0, 1) for parts in codes]) for i in (0, 1)
    )
    return Mxfp4(packed.unflatten(-1, (-1, BLOCK // 2)), scale)


def split(code: Mxfp4, weights: Sequence[Sequence[str]]) -> Iterable[tuple[str, Mxfp4]]:
    """Name and code of each weight, from the two tensors of either layout."""
    if code.packed.dim() == 2:
        ((name,),) = weights
        yield name, code
        return
    packed = code.packed.flatten(-2)
    for expert, parts in enumerate(weights):
        for i, name in enumerate(parts):
            yield name, Mxfp4(packed[expert, i :: len(parts)], code.scale[expert, i :: len(parts)])


def quantization_config(layout: Layout, rule: Rule, others: Sequence[str]) -> dict[str, Any]:
    """Of config.json; `others` are the matrices that are not packed."""
    modules = sorted({name.removesuffix(".weight") for name in others})
    return {**_CONFIGS[layout](modules), RULE_KEY: rule}


def _compressed_tensors(others: Sequence[str]) -> dict[str, Any]:
    """`format` twice: some loaders read it from the group, some from the top."""
    used = [pattern for pattern in _IGNORE if any(_matches(pattern, name) for name in others)]
    single = [name for name in others if not any(_matches(pattern, name) for pattern in used)]
    packing = "mxfp4-pack-quantized"
    weights = {
        **{"num_bits": 4, "type": "float", "strategy": "group", "group_size": BLOCK, "symmetric": True},
        **{"dynamic": False, "scale_dtype": "torch.uint8"},
    }
    group = {"format": packing, "targets": ["Linear"], "input_activations": None, "weights": weights}
    return {
        **{"quant_method": "compressed-tensors", "format": packing, "quantization_status": "compressed"},
        **{"kv_cache_scheme": None, "ignore": used + single, "config_groups": {"group_0": group}},
    }


def _gpt_oss(others: Sequence[str]) -> dict[str, Any]:
    """One pattern for all layers; attention as a whole."""
    modules = {re.sub(r"\.\d+\.", ".*.", re.sub(r"(self_attn)\..*", r"\1", name)) for name in others}
    return {"quant_method": "mxfp4", "modules_to_not_convert": sorted(modules)}


def _matches(pattern: str, name: str) -> bool:
    return re.match(pattern.removeprefix("re:"), name) is not None


_CONFIGS: dict[Layout, Callable[[Sequence[str]], dict[str, Any]]] = {
    "compressed-tensors": _compressed_tensors,
    "gpt-oss": _gpt_oss,
}
