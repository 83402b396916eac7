"""Checkpoints that SGLang would serve wrongly without a word."""

from __future__ import annotations

from pathlib import Path

from megatron_mopd.config import Config
from megatron_mopd.errors import UserError
from megatron_mopd.hf_folder import read_hf_config

ALL_SPARSE = ("Qwen3MoeForCausalLM", "Qwen2MoeForCausalLM")
"""SGLang's models/qwen3_moe.py and qwen2_moe.py make every layer a layer of experts, and leave those of a layer that is
dense in the checkpoint as the memory was."""


def check_checkpoints(config: Config) -> None:
    """Raise UserError for the first checkpoint of the configuration that SGLang servers, wherever they are, would get
    wrong."""
    if config.rollout.engine == "sglang":
        _check(config.student.checkpoint, "student.checkpoint", "rollout.engine")
    if config.teachers.backend == "sglang":
        for i, teacher in enumerate(config.teachers.models):
            _check(teacher.checkpoint, f"teachers.models.{i} ({teacher.name})", "teachers.backend")


def _check(folder: Path, key: str, option: str) -> None:
    hf_config = read_hf_config(folder, key)
    if hf_config["architectures"][0] not in ALL_SPARSE:
        return
    if hf_config.get("mlp_only_layers") or hf_config.get("decoder_sparse_step", 1) != 1:
        raise UserError(
            f"{key}: {folder} has dense layers (mlp_only_layers, decoder_sparse_step), which SGLang takes for layers "
            f"of experts; set {option}=embedded or use a checkpoint with experts in every layer"
        )
