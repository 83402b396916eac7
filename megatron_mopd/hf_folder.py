"""Hugging Face checkpoint folders as their JSON files describe them, read before torch or any model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_mopd.errors import UserError


def read_hf_config(folder: Path, key: str = "checkpoint") -> dict[str, Any]:
    """config.json of a Hugging Face folder whose safetensors files are all there; `key` names the option in the
    error."""
    if not folder.is_dir():
        raise UserError(f"{key}: {folder} is not a folder")
    config = _read_json(folder / "config.json", key)
    if not isinstance(config, dict) or "architectures" not in config:
        raise UserError(f"{key}: {folder}/config.json names no architectures; it must be a Hugging Face model folder")
    index = folder / "model.safetensors.index.json"
    shards = sorted(set(_read_json(index, key)["weight_map"].values())) if index.is_file() else ["model.safetensors"]
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{key}: {folder} has no {missing[0]}; a checkpoint is a Hugging Face folder with safetensors")
    return config


def read_token_map(folder: Path, key: str) -> dict[int, str]:
    """Token id -> token from tokenizer.json."""
    tokenizer = _read_json(folder / "tokenizer.json", key)
    vocabulary = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, dict):
        tokens = {index: token for token, index in vocabulary.items()}
    else:
        tokens = {index: entry[0] for index, entry in enumerate(vocabulary)}
    tokens.update({added["id"]: added["content"] for added in tokenizer.get("added_tokens", [])})
    return tokens


def _read_json(file: Path, key: str) -> Any:
    if not file.is_file():
        raise UserError(f"{key}: {file} does not exist; a checkpoint is a Hugging Face folder")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{key}: {file} is not valid JSON: {error}") from None
