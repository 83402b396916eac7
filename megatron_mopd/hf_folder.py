"""Hugging Face checkpoint folders as their JSON files describe them, read before torch or any model is loaded."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from megatron_mopd.errors import UserError

MAX_HEADER_BYTES = 100_000_000
"""Of a safetensors file; the format's own limit."""
INDEX_FILE = "model.safetensors.index.json"
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
"""Endings of what holds weights, or says where they are."""
UMASK = os.umask(0o077)
os.umask(UMASK)  # there is no other way to ask


def let_others_read(file: Path) -> None:
    """safetensors makes its files for their owner alone; servers and teachers' users may be others."""
    file.chmod(0o666 & ~UMASK)


def copy_all_but_weights(source: Path, target: Path) -> None:
    """Config, tokenizer and templates."""
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith(WEIGHT_FILES):
            shutil.copyfile(file, target / file.name)


def read_hf_config(folder: Path, key: str = "checkpoint") -> dict[str, Any]:
    """config.json of a Hugging Face folder whose safetensors files are all there; `key` names the option in the
    error."""
    if not folder.is_dir():
        raise UserError(f"{key}: {folder} is not a folder")
    config = _read_json(folder / "config.json", key)
    if not isinstance(config, dict) or "architectures" not in config:
        raise UserError(f"{key}: {folder}/config.json names no architectures; it must be a Hugging Face model folder")
    if not isinstance(size := config.get("vocab_size"), int) or size < 1:
        raise UserError(f"{key}: {folder}/config.json has vocab_size={size!r}, which must be a positive integer")
    missing = [name for name in _shards(folder, key) if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{key}: {folder} has no {missing[0]}; a checkpoint is a Hugging Face folder with safetensors")
    return config


def read_token_map(folder: Path, key: str) -> dict[int, str]:
    """Token id -> token from tokenizer.json."""
    tokenizer = _read_json(folder / "tokenizer.json", key)
    try:
        vocabulary = tokenizer["model"]["vocab"]
        if isinstance(vocabulary, dict):
            tokens = {index: token for token, index in vocabulary.items()}
        else:
            tokens = {index: entry[0] for index, entry in enumerate(vocabulary)}
        tokens.update({added["id"]: added["content"] for added in tokenizer.get("added_tokens", [])})
    except (AttributeError, KeyError, TypeError, IndexError):
        raise UserError(f"{key}: {folder}/tokenizer.json has no vocabulary of tokens and ids") from None
    return tokens


def read_chat_template(folder: Path, key: str) -> str:
    """The template that renders a prompt without tools, where transformers finds it; "" where there is none."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"{key}: {file} cannot be read: {error}") from None
    if not (folder / "tokenizer_config.json").is_file():
        return ""
    try:
        template = _read_json(folder / "tokenizer_config.json", key).get("chat_template") or ""
        if not isinstance(template, str):  # of several
            template = {entry["name"]: entry["template"] for entry in template}.get("default", "")
    except (AttributeError, KeyError, TypeError):
        raise UserError(f"{key}: {folder}/tokenizer_config.json has no readable chat_template") from None
    return template


class StoredTensor(NamedTuple):
    """A tensor's `size` bytes from offset `start` of a safetensors file."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def read_tensors(folder: Path, key: str) -> list[StoredTensor]:
    """Where every tensor lies, file by file. UserError for a file that is not as long as its header says (8 bytes of
    length, the header, the tensors back to back)."""
    return [tensor for name in _shards(folder, key) for tensor in _tensors_of(folder / name, key)]


def check_weight_files(folder: Path, key: str) -> None:
    """UserError for a cut or foreign file."""
    read_tensors(folder, key)


def _tensors_of(file: Path, key: str) -> list[StoredTensor]:
    try:
        with file.open("rb") as opened:
            header_bytes = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(min(header_bytes, MAX_HEADER_BYTES)))
        data = 8 + header_bytes
        tensors = [
            StoredTensor(file, name, str(entry["dtype"]), tuple(entry["shape"]), data + start, end - start)
            for name, entry in header.items()
            if name != "__metadata__"
            for start, end in [entry["data_offsets"]]
        ]
        expected = max((tensor.start + tensor.size for tensor in tensors), default=data)
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        raise UserError(f"{key}: {file} is not a safetensors file; copy the checkpoint again") from None
    if file.stat().st_size != expected:
        raise UserError(
            f"{key}: {file} has {file.stat().st_size} bytes, its header says {expected}; copy the checkpoint again"
        )
    return tensors


def _shards(folder: Path, key: str) -> list[str]:
    index = folder / INDEX_FILE
    if not index.is_file():
        return ["model.safetensors"]
    content = _read_json(index, key)
    try:
        return sorted(set(content["weight_map"].values()))
    except (AttributeError, KeyError, TypeError):
        raise UserError(f"{key}: {index} has no weight_map from tensor names to files") from None


def _read_json(file: Path, key: str) -> Any:
    if not file.is_file():
        raise UserError(f"{key}: {file} does not exist; a checkpoint is a Hugging Face folder")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{key}: {file} is not valid JSON: {error}") from None
