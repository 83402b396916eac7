"""A Hugging Face config and the `megatron:` table to Megatron GPT models, one per virtual pipeline stage of this rank.

Fields come in four layers, each over the one before: the family's (what the checkpoint is), the layout's, the device's
(Transformer Engine and fused kernels on a GPU; local layers and float32 on a CPU), and the user's table, verbatim.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from megatron_mopd.errors import UserError
from megatron_mopd.mcore import device
from megatron_mopd.mcore.families import family_of
from megatron_mopd.mcore.gpu_options import GPU_FIELDS, check_gpu
from megatron_mopd.mcore.layout import Layout
from megatron_mopd.mcore.local_layers import use_local_layers
from megatron_mopd.mcore.options import split_megatron_table
from megatron_mopd.mcore.precision import quant_recipe

# isort: split
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

VOCAB_MULTIPLE = 16
"""Rows of the vocabulary on a tensor-parallel rank are a multiple of this, as tensor cores like them."""


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """The vocabulary as Megatron holds it: up to a multiple of tp * VOCAB_MULTIPLE."""
    multiple = tp * VOCAB_MULTIPLE
    return -(-vocab_size // multiple) * multiple


def transformer_config(
    megatron: Mapping[str, Any], hf_config: Mapping[str, Any], with_quantized_experts: bool = False
) -> TransformerConfig:
    """The TransformerConfig of this job. Raises UserError for what the table gets wrong, upstream's checks included."""
    layout, table = Layout.from_table(megatron), split_megatron_table(megatron).transformer
    architecture = family_of(hf_config).architecture(hf_config)
    bf16 = table.get("bf16", device.HAS_GPU)
    dtype = torch.bfloat16 if bf16 else torch.float32
    fields = {
        **architecture.transformer,
        **architecture.training,
        **_layout_fields(layout),
        **_device_fields(table),
        "activation_func": {"silu": F.silu}[architecture.activation],
        "bf16": bf16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "moe_token_dispatcher_type": "alltoall",
        "calculate_per_token_loss": True,  # contributions of ranks and micro-batches are added, see mcore/learner.py
        **{key: value for key, value in table.items() if key != "sequence_parallel"},
        "quant_recipe": quant_recipe(table, with_quantized_experts),
    }
    cls = TransformerConfig
    if fields.get("multi_latent_attention"):
        cls = MLATransformerConfig
        fields = {"rope_type": "rope", "rotary_base": architecture.rotary_base, **fields}
        fields["apply_rope_fusion"] = table.get("apply_rope_fusion", False)  # upstream's kernel knows only yarn
        for of_grouped_attention in ("num_query_groups", "kv_channels"):
            fields.pop(of_grouped_attention)
    try:
        return cls(**fields)
    except (ValueError, AssertionError, TypeError) as error:  # upstream's own checks of combinations
        raise UserError(f"megatron: {' '.join(str(error).split())}") from error


def _layout_fields(layout: Layout) -> dict[str, Any]:
    fields = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": layout.sp,
        "variable_seq_lengths": layout.pp > 1,  # packed micro-batches differ in length
    }
    if layout.vpp is not None:
        fields |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}  # batched p2p gives a silently wrong loss at PP 2
    return fields


def _device_fields(table: dict[str, Any]) -> dict[str, Any]:
    check_gpu(table, torch.cuda.get_device_capability() if device.HAS_GPU else None)
    if not device.HAS_GPU:
        return {"use_cpu_initialization": True, **dict.fromkeys(GPU_FIELDS, False)}
    if importlib.util.find_spec("transformer_engine") is None:
        raise UserError("training on a GPU needs Transformer Engine; install transformer-engine[pytorch]")
    return GPU_FIELDS


def build_model(
    megatron: Mapping[str, Any], hf_config: Mapping[str, Any], with_quantized_experts: bool = False
) -> list[GPTModel]:
    """One unwrapped model per virtual stage that this rank holds. Needs `initialize_parallel`.

    Weights are Megatron's random ones; `weights.load_hf` fills them. With `labels=None` the last stage returns logits
    [b, s, padded vocabulary / tp].
    """
    config = transformer_config(megatron, hf_config, with_quantized_experts)
    stages = range(config.virtual_pipeline_model_parallel_size or 1)
    vp_stages = [None] if config.virtual_pipeline_model_parallel_size is None else stages
    return [_build_stage(config, hf_config, vp_stage) for vp_stage in vp_stages]


def _build_stage(config: TransformerConfig, hf_config: Mapping[str, Any], vp_stage: int | None) -> GPTModel:
    architecture = family_of(hf_config).architecture(hf_config)
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=device.HAS_GPU, normalization=config.normalization, vp_stage=vp_stage
    )
    if not device.HAS_GPU:
        use_local_layers(spec)
    model = GPTModel(
        config,
        spec,  # pyright: ignore[reportArgumentType] (a block spec; upstream's own annotation is too narrow)
        vocab_size=padded_vocab_size(architecture.vocab_size, config.tensor_model_parallel_size),
        max_sequence_length=architecture.max_sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=architecture.rotary_base,  # pyright: ignore[reportArgumentType] (an int by annotation only)
        vp_stage=vp_stage,
    )
    return model.to(device.DEVICE)
