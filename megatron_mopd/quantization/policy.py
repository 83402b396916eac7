"""Which weights are quantized: the routed experts' and nothing else.

Attention, latent projections, shared experts, routers, embeddings and the output layer keep their precision: they are
few of the weights, and every token goes through them.

Torch-free, so that the preflight answers before torch is imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_mopd.config import Quantization
from megatron_mopd.errors import UserError
from megatron_mopd.mcore.gpu_options import OTHER_WEIGHTS

BLOCK = 32
"""Weights along the input dimension that share a scale."""

_ROUTED_EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.\d+\.linear_fc[12]\.weight$")


def is_quantized(name: str) -> bool:
    """`name` is that of a mcore/parameters.py Parameter."""
    return _ROUTED_EXPERT.search(name) is not None


def check_quantization(
    options: Quantization, transformer: Mapping[str, Any], etp: int, megatron: Mapping[str, Any]
) -> None:
    """UserError where blocks do not fit the experts of an architecture (families.Architecture.transformer), where `etp`
    ranks would cut one, or where the table `megatron` would have the layers use other weights."""
    if options.experts == "none":
        return
    for key in OTHER_WEIGHTS:
        if megatron.get(key) not in (None, False, "none"):
            raise UserError(
                f"megatron.{key}={megatron[key]!r} does not go with quantization.experts={options.experts}, whose "
                "values are made anew in each step; remove one of the two"
            )
    if not transformer.get("num_moe_experts"):
        raise UserError("quantization.experts: the student has no routed experts; set quantization.experts=none")
    hidden, intermediate = transformer["hidden_size"], transformer["moe_ffn_hidden_size"]
    for name, size in (("hidden_size", hidden), ("moe_intermediate_size", intermediate)):
        if size % BLOCK:
            raise UserError(
                f"quantization.experts={options.experts}: {name} is {size}, no multiple of the {BLOCK} weights that "
                "share a scale; set quantization.experts=none"
            )
    if intermediate % (etp * BLOCK):
        whole = [str(n) for n in range(1, etp) if intermediate % (n * BLOCK) == 0]
        raise UserError(
            f"megatron.expert_tensor_parallel_size={etp} cuts moe_intermediate_size {intermediate} within the {BLOCK} "
            f"weights that share a scale; set it to {' or '.join(whole)}"
        )


def packs_mxfp4(hf_config: Mapping[str, Any]) -> bool:
    """A config.json says that experts are stored as codes of MXFP4, in one of the layouts of packed_layouts.py."""
    packed = hf_config.get("quantization_config") or {}
    return packed.get("quant_method") == "mxfp4" or packed.get("format") == "mxfp4-pack-quantized"


def refuse_packed(folder: Path, hf_config: Mapping[str, Any], key: str, reader: str = "training") -> None:
    """UserError for a checkpoint whose weights are stored as codes, which only servers read."""
    if packed := hf_config.get("quantization_config"):
        way_out = "name one that has them"
        if packs_mxfp4(hf_config):
            way_out = f"these have the same values: python -m checkpoints_conversion.import_mxfp4 {folder} OUT"
        method = packed.get("quant_method")
        raise UserError(f"{key}: {folder} is quantized ({method!r}); {reader} reads plain weights; {way_out}")
