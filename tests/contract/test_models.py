"""What the embedded backend refuses to load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GraniteConfig, GraniteForCausalLM, MistralConfig, MistralForCausalLM

from megatron_mopd.embedded.models import load_model
from megatron_mopd.errors import UserError

SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a Hugging Face checkpoint folder"):
        load_model(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    with pytest.raises(UserError, match=r"no model\.safetensors"):
        load_model(tmp_path)


def test_a_torn_weight_file_is_refused(student: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((student / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((student / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(UserError, match="cannot be loaded"):
        load_model(tmp_path)


def test_the_model_is_float32_and_frozen(student: Path) -> None:
    model = load_model(student)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not any(p.requires_grad for p in model.parameters())
    assert not model.training


def test_logits_that_are_transformed_after_the_head_are_refused(tmp_path: Path) -> None:
    GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8.0)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="its logits differ when they are scored"):
        load_model(tmp_path)


def test_sliding_windows_are_refused(tmp_path: Path) -> None:
    MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="full attention only"):
        load_model(tmp_path)
