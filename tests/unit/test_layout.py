"""A layout that does not fit is refused with the numbers and what to change, before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from megatron_mopd.errors import UserError
from megatron_mopd.mcore.families import family_of
from megatron_mopd.mcore.layout import Layout

QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}


def check(megatron: dict[str, Any], world_size: int, **fields: Any) -> None:
    Layout.from_table(megatron).check({**QWEN3_MOE, **fields}, world_size)


@pytest.mark.parametrize(
    ("megatron", "world_size", "dp"),
    [
        ({}, 3, 3),
        ({"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, 2, 1),
        ({"pipeline_model_parallel_size": 3, "virtual_pipeline_model_parallel_size": 2}, 6, 2),
        ({"context_parallel_size": 2, "expert_model_parallel_size": 8}, 8, 4),
        ({"tensor_model_parallel_size": 4}, 8, 2),
    ],
)
def test_a_layout_that_fits_is_accepted(megatron: dict[str, Any], world_size: int, dp: int):
    check(megatron, world_size)
    assert Layout.from_table(megatron).dp(world_size) == dp


@pytest.mark.parametrize(
    ("megatron", "world_size", "says"),
    [
        ({"tensor_model_parallel_size": 8}, 8, r"attention heads \(12\) .*tensor_model_parallel_size = 8"),
        ({"tensor_model_parallel_size": 3}, 3, r"key-value heads \(4\)"),
        ({"tensor_model_parallel_size": 2}, 3, r"3 processes do not divide into tensor 2 x pipeline 1 x context 1"),
        (
            {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
            2,
            r"expert-tensor 2 x expert 2 .*expert_tensor_parallel_size=1",
        ),
        ({"expert_model_parallel_size": 3}, 3, r"experts \(8\) .*expert_model_parallel_size = 3"),
        ({"expert_tensor_parallel_size": 5}, 5, r"the expert width \(64\)"),
        ({"pipeline_model_parallel_size": 4}, 4, r"layers \(6\) .* = 4; choose a divisor of 6"),
        (
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            2,
            r"layers \(6\) .*\(x virtual\) = 4",
        ),
        ({"virtual_pipeline_model_parallel_size": 2}, 1, "needs pipeline_model_parallel_size of 2 or more"),
        (
            {"tensor_model_parallel_size": 2, "sequence_parallel": False},
            2,
            "need sequence parallelism; remove megatron.sequence_parallel=false",
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(megatron: dict[str, Any], world_size: int, says: str):
    with pytest.raises(UserError, match=says):
        check(megatron, world_size)


def test_every_problem_is_in_one_message():
    with pytest.raises(UserError) as error:
        check({"expert_model_parallel_size": 3, "pipeline_model_parallel_size": 4}, 12)
    assert "experts (8)" in str(error.value)
    assert "layers (6)" in str(error.value)


def test_a_dense_layer_counts_its_width():
    table = {"tensor_model_parallel_size": 4}
    check(table, 4, intermediate_size=98)
    with pytest.raises(UserError, match=r"dense MLP width \(98\)"):
        check(table, 4, intermediate_size=98, mlp_only_layers=[0])


def test_uneven_stages_are_left_to_megatron():
    check({"pipeline_model_parallel_size": 4, "num_layers_in_first_pipeline_stage": 3}, 4)


def test_sequence_parallelism_follows_tensor_parallelism():
    assert Layout.from_table({"tensor_model_parallel_size": 2}).sp
    assert not Layout.from_table({"tensor_model_parallel_size": 2, "sequence_parallel": False}).sp
    assert not Layout.from_table({}).sp


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True])
def test_a_size_must_be_a_positive_integer(value: object):
    with pytest.raises(UserError, match=r"megatron\.context_parallel_size=.* must be a positive integer"):
        Layout.from_table({"context_parallel_size": value})


def test_an_unknown_architecture_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match="'llama' of the checkpoint is not supported; supported: qwen3_moe"):
        family_of({"model_type": "llama"})


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "RoPE scaling of type 'yarn'"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0, which is not supported; supported: None"),
        ({"logits_scaling": 8.0}, "logits_scaling=8.0, which is not supported; supported: 1.0"),
    ],
)
def test_what_megatron_could_not_follow_exactly_is_refused(fields: dict[str, Any], says: str):
    with pytest.raises(UserError, match=says):
        check({}, 1, **fields)


def test_a_missing_config_entry_is_named():
    config = {key: value for key, value in QWEN3_MOE.items() if key != "rms_norm_eps"}
    with pytest.raises(UserError, match=r"config\.json of the checkpoint has no rms_norm_eps"):
        family_of(config).architecture(config)


def test_checking_a_layout_imports_no_torch():
    code = "import sys, megatron_mopd.mcore.layout; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
