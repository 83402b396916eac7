"""A tiny Qwen3-MoE checkpoint as transformers writes it, and the parallel layouts that the laws are checked in."""

from __future__ import annotations

import json
from pathlib import Path

VOCAB_SIZE = 250
"""Not a multiple of anything, so that every layout pads it."""

LAYOUTS = {
    "single": (1, {}),
    "TP2+SP": (2, {"tensor_model_parallel_size": 2}),
    "EP2": (2, {"expert_model_parallel_size": 2}),
    "TP2xEP2": (
        2,
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    ),
    "TP2+ETP2": (2, {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}),
    "ETP2": (2, {"expert_tensor_parallel_size": 2}),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
    "PP2xVPP2": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "CP2": (2, {"context_parallel_size": 2}),
    "DP2": (2, {}),
    "TP2xPP2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "TP2xEP2+ETP2": (4, {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}),
    "TP4": (4, {"tensor_model_parallel_size": 4}),
}
"""Name to (processes, `megatron:` table). TP4 has more ranks than key-value heads."""


def write_checkpoint(folder: Path, seed: int = 0, **fields: object) -> None:
    """Save a random model: 4 layers, of which one is dense, 8 experts top-2, 2 key-value heads, untied."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "tie_word_embeddings": False,
            "initializer_range": 0.1,
            **fields,
        }
    )
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)  # ones would hide a norm that is skipped or swapped
    model.save_pretrained(folder)
    tokens = {f"t{i}": i for i in range(model.config.vocab_size)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
