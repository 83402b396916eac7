"""Qwen3-MoE: grouped-query attention with norms on queries and keys, RoPE, softmax router, SwiGLU experts.

Tensor names are those of the published checkpoints, one tensor per expert, which transformers and SGLang read.
"""

from collections.abc import Mapping
from typing import Any

from megatron_mopd.errors import UserError
from megatron_mopd.mcore.families.family import Architecture, Family, HfConfig, Rule


def _architecture(values: Mapping[str, Any]) -> Architecture:
    hf = HfConfig(values)
    hf.refuse_unless("hidden_act", "silu")
    hf.refuse_unless("attention_bias", False)
    hf.refuse_unless("tie_word_embeddings", False)
    hf.refuse_unless("use_sliding_window", False)
    hf.refuse_unless("attention_dropout", 0.0)
    hf.refuse_unless("final_logit_softcapping", None)  # the log-prob head knows logits as they are
    hf.refuse_unless("logits_scaling", 1.0)
    heads, layers = hf.get("num_attention_heads"), hf.get("num_hidden_layers")
    return Architecture(
        vocab_size=hf.get("vocab_size"),
        max_sequence_length=hf.get("max_position_embeddings"),
        rotary_base=_rotary_base(hf),
        activation="silu",
        transformer={
            "num_layers": layers,
            "hidden_size": hf.get("hidden_size"),
            "num_attention_heads": heads,
            "num_query_groups": hf.get("num_key_value_heads"),
            "kv_channels": values.get("head_dim") or hf.get("hidden_size") // heads,
            "qk_layernorm": True,
            "ffn_hidden_size": hf.get("intermediate_size"),
            "gated_linear_unit": True,
            "add_bias_linear": False,
            "normalization": "RMSNorm",
            "layernorm_epsilon": hf.get("rms_norm_eps"),
            "multi_latent_attention": False,
            "num_moe_experts": hf.get("num_experts", "num_local_experts"),
            "moe_layer_freq": _moe_layers(hf, layers),
            "moe_ffn_hidden_size": hf.get("moe_intermediate_size"),
            "moe_router_topk": hf.get("num_experts_per_tok"),
            "moe_router_score_function": "softmax",
            # Softmax over the chosen experts alone equals softmax over all of them renormalised to sum to one.
            "moe_router_pre_softmax": not hf.get("norm_topk_prob"),
            "moe_router_num_groups": None,
            "moe_router_topk_scaling_factor": None,
            "moe_router_enable_expert_bias": False,
            "moe_shared_expert_intermediate_size": None,
        },
        training={
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
        },
    )


def _rotary_base(hf: HfConfig) -> float:
    rope = hf.values.get("rope_parameters") or hf.values.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        raise UserError(f"config.json has RoPE scaling of type {rope_type!r}, which is not supported; remove it")
    return rope["rope_theta"] if "rope_theta" in rope else hf.get("rope_theta")


def _moe_layers(hf: HfConfig, layers: int) -> list[int]:
    """1 for a layer of experts, 0 for a dense one."""
    dense = set(hf.values.get("mlp_only_layers") or ())
    every = hf.values.get("decoder_sparse_step", 1)
    return [int(layer not in dense and (layer + 1) % every == 0) for layer in range(layers)]


_LAYER = "decoder.layers.{layer}."
_HF_LAYER = "model.layers.{layer}."
_EXPERT = _LAYER + "mlp.experts.local_experts.{expert}."
_HF_EXPERT = _HF_LAYER + "mlp.experts.{expert}."

FAMILY = Family(
    model_type="qwen3_moe",
    architecture=_architecture,
    rules=(
        Rule("embedding.word_embeddings.weight", "vocab", ("model.embed_tokens.weight",)),
        Rule("decoder.final_layernorm.weight", "replicated", ("model.norm.weight",)),
        Rule("output_layer.weight", "vocab", ("lm_head.weight",)),
        Rule(_LAYER + "input_layernorm.weight", "replicated", (_HF_LAYER + "input_layernorm.weight",)),
        Rule(
            _LAYER + "self_attention.linear_qkv.weight",
            "qkv",
            tuple(_HF_LAYER + f"self_attn.{x}_proj.weight" for x in "qkv"),
        ),
        Rule(_LAYER + "self_attention.q_layernorm.weight", "replicated", (_HF_LAYER + "self_attn.q_norm.weight",)),
        Rule(_LAYER + "self_attention.k_layernorm.weight", "replicated", (_HF_LAYER + "self_attn.k_norm.weight",)),
        Rule(_LAYER + "self_attention.linear_proj.weight", "row", (_HF_LAYER + "self_attn.o_proj.weight",)),
        Rule(_LAYER + "pre_mlp_layernorm.weight", "replicated", (_HF_LAYER + "post_attention_layernorm.weight",)),
        Rule(
            _LAYER + "mlp.linear_fc1.weight",
            "gated",
            (_HF_LAYER + "mlp.gate_proj.weight", _HF_LAYER + "mlp.up_proj.weight"),
        ),
        Rule(_LAYER + "mlp.linear_fc2.weight", "row", (_HF_LAYER + "mlp.down_proj.weight",)),
        Rule(_LAYER + "mlp.router.weight", "replicated", (_HF_LAYER + "mlp.gate.weight",)),
        Rule(
            _EXPERT + "linear_fc1.weight",
            "gated",
            (_HF_EXPERT + "gate_proj.weight", _HF_EXPERT + "up_proj.weight"),
        ),
        Rule(_EXPERT + "linear_fc2.weight", "row", (_HF_EXPERT + "down_proj.weight",)),
    ),
)
