"""Which weights are quantized, and which models and layouts are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_mopd.config import Quantization
from megatron_mopd.errors import UserError
from megatron_mopd.quantization.policy import check_quantization, is_quantized, refuse_packed

LAYER = "decoder.layers.3."
MXFP4 = Quantization(experts="mxfp4")
FITTING = {"num_moe_experts": 8, "hidden_size": 64, "moe_ffn_hidden_size": 96}


@pytest.mark.parametrize(
    ("name", "quantized"),
    [
        (LAYER + "mlp.experts.local_experts.17.linear_fc1.weight", True),
        (LAYER + "mlp.experts.local_experts.0.linear_fc2.weight", True),
        (LAYER + "mlp.experts.local_experts.0.linear_fc2.bias", False),
        (LAYER + "mlp.shared_experts.linear_fc1.weight", False),
        (LAYER + "mlp.linear_fc1.weight", False),
        (LAYER + "mlp.router.weight", False),
        (LAYER + "mlp.router.expert_bias", False),
        (LAYER + "mlp.fc1_latent_proj.weight", False),
        (LAYER + "self_attention.linear_qkv.weight", False),
        (LAYER + "self_attention.linear_kv_down_proj.weight", False),
        (LAYER + "pre_mlp_layernorm.weight", False),
        ("embedding.word_embeddings.weight", False),
        ("output_layer.weight", False),
    ],
)
def test_routed_experts_and_nothing_else(name: str, quantized: bool) -> None:
    assert is_quantized(name) == quantized


@pytest.mark.parametrize("etp", [1, 3])
def test_what_fits_is_accepted(etp: int) -> None:
    check_quantization(MXFP4, FITTING, etp, {})


@pytest.mark.parametrize(
    ("changed", "etp", "said"),
    [
        ({"moe_ffn_hidden_size": 48}, 1, "moe_intermediate_size is 48, no multiple of the 32"),
        ({"hidden_size": 72}, 1, "hidden_size is 72, no multiple of the 32"),
        ({"num_moe_experts": None}, 1, "the student has no routed experts"),
        ({}, 2, "megatron.expert_tensor_parallel_size=2 cuts moe_intermediate_size 96 .*; set it to 1$"),
        ({"moe_ffn_hidden_size": 192}, 4, "set it to 1 or 2 or 3$"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], etp: int, said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_quantization(MXFP4, {**FITTING, **changed}, etp, {})
    check_quantization(Quantization(), {**FITTING, **changed}, etp, {})


@pytest.mark.parametrize("key", ["fp8_param", "cuda_graph_impl", "enable_cuda_graph"])
def test_options_that_keep_weights_of_another_time_are_refused(key: str) -> None:
    with pytest.raises(UserError, match=f"megatron.{key}='local' does not go with quantization.experts=mxfp4"):
        check_quantization(MXFP4, FITTING, 1, {key: "local"})
    check_quantization(MXFP4, FITTING, 1, {key: False})


@pytest.mark.parametrize(
    "packed", [{"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}, {"quant_method": "mxfp4"}]
)
def test_a_packed_checkpoint_is_refused_with_the_way_out(packed: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"python -m checkpoints_conversion\.import_mxfp4 some/folder OUT"):
        refuse_packed(Path("some/folder"), {"quantization_config": packed}, "student.checkpoint")
    refuse_packed(Path("some/folder"), {}, "student.checkpoint")


def test_what_cannot_be_imported_is_not_told_to_be() -> None:
    config = {"quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(
        UserError, match=r"is quantized \('fp8'\); training reads plain weights; name one that has them$"
    ):
        refuse_packed(Path("some/folder"), config, "student.checkpoint")
