"""A Hugging Face folder read tensor by tensor, and another written shard by shard beside its place.

Promises (tests/unit/test_packed_folder.py): one shard is in memory; the new folder is complete or absent; what is no
weight is copied.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_mopd.errors import UserError
from megatron_mopd.hf_folder import (
    INDEX_FILE,
    StoredTensor,
    copy_all_but_weights,
    let_others_read,
    read_hf_config,
    read_tensors,
)


class HfFolder:
    """Checked when made: UserError for a folder that is no checkpoint or is cut."""

    def __init__(self, folder: Path):
        self.path, self.config = folder, read_hf_config(folder, "FOLDER")
        self.tensors: dict[str, StoredTensor] = {t.name: t for t in read_tensors(folder, "FOLDER")}
        self._open: dict[Path, Any] = {}

    def tensor(self, name: str) -> Tensor:
        return self._file(self.tensors[name].file).get_tensor(name)

    def metadata(self) -> dict[Path, dict[str, str]]:
        """Of each file."""
        return {file: self._file(file).metadata() or {} for file in {t.file for t in self.tensors.values()}}

    def dtype(self) -> torch.dtype:
        """Of the model's weights, as config.json has it."""
        name = str(self.config.get("dtype") or self.config.get("torch_dtype"))
        if name not in ("bfloat16", "float32"):
            raise UserError(f"{self.path}/config.json has dtype {name}; set it to bfloat16 or float32")
        return getattr(torch, name)

    def _file(self, file: Path) -> Any:
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        return self._open[file]


class ShardWriter:
    """`metadata` says of a file's tensors what is written beside them."""

    def __init__(self, out: Path, shard_bytes: int, metadata: Callable[[Mapping[str, Tensor]], dict[str, str]]):
        if out.exists():
            raise UserError(f"{out} is there already; remove it or name another folder")
        self.out, self.partial = out, out.with_name(f".{out.name}.partial")
        self.shard_bytes, self.metadata = shard_bytes, metadata
        self.file_of: dict[str, str] = {}
        self.total_bytes = 0
        self._pending: dict[str, Tensor] = {}
        self._files = 0
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """They go to one file."""
        self._pending |= {name: tensor.contiguous() for name, tensor in tensors.items()}
        if sum(tensor.nbytes for tensor in self._pending.values()) >= self.shard_bytes:
            self._flush()

    def _flush(self) -> None:
        if not self._pending:
            return
        file = f"model-{self._files:05d}.safetensors"
        save_file(self._pending, self.partial / file, {"format": "pt", **self.metadata(self._pending)})
        let_others_read(self.partial / file)
        self.file_of |= dict.fromkeys(self._pending, file)
        self.total_bytes += sum(tensor.nbytes for tensor in self._pending.values())
        self._files += 1
        self._pending = {}

    def complete(self, source: Path, config: Mapping[str, Any]) -> None:
        """Config, tokenizer and templates; then the folder takes its place."""
        self._flush()
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(self.file_of.items()))}
        copy_all_but_weights(source, self.partial)
        (self.partial / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
        (self.partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        self.partial.rename(self.out)
