"""Hugging Face folders: read tensor by tensor, written shard by shard beside their place.

Promises (tests/unit/test_packed_folder.py, tests/distributed/test_weights.py): one shard is in memory; a new folder is
complete or absent; what is no weight is copied.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
        stored = read_tensors(folder, "FOLDER")
        self.tensors: dict[str, StoredTensor] = {t.name: t for t in stored}
        if twice := next((t for t in stored if self.tensors[t.name] is not t), None):
            raise UserError(
                f"{twice.file} and {self.tensors[twice.name].file} both hold {twice.name}; remove one of them"
            )
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
    """Of one process. `metadata` says of a file's tensors what is written beside them."""

    def __init__(
        self,
        folder: Path,
        shard_bytes: int,
        rank: int = 0,
        metadata: Callable[[Mapping[str, Tensor]], dict[str, str]] = lambda _: {},
    ):
        self.folder, self.shard_bytes, self.rank, self.metadata = folder, shard_bytes, rank, metadata
        self.written = Written({}, 0)
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._files = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """They go to one file."""
        for name, tensor in tensors.items():
            # A copy of its own: safetensors refuses tensors that share storage.
            self._pending[name] = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
            self._pending_bytes += tensor.nbytes
        if self._pending_bytes >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        if not self._pending:
            return
        file = f"model-{self.rank:05d}-{self._files:05d}.safetensors"
        save_file(self._pending, self.folder / file, {"format": "pt", **self.metadata(self._pending)})
        let_others_read(self.folder / file)
        files, num_bytes = self.written
        self.written = Written({**files, **dict.fromkeys(self._pending, file)}, num_bytes + self._pending_bytes)
        self._files += 1
        self._pending, self._pending_bytes = {}, 0


class Written(NamedTuple):
    """By one writer."""

    file_of: Mapping[str, str]
    num_bytes: int


def partial_of(folder: Path) -> Path:
    """Where a folder is written before it takes its place."""
    return folder.with_name(f".{folder.name}.partial")


def make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def complete(partial: Path, source: Path, of_writers: Sequence[Written]) -> None:
    """The index; config, tokenizer and templates of `source`."""
    weight_map = {name: file for written in of_writers for name, file in written.file_of.items()}
    assert len(weight_map) == sum(len(written.file_of) for written in of_writers), "two ranks wrote one tensor"
    total_size = sum(written.num_bytes for written in of_writers)
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    (partial / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    copy_all_but_weights(source, partial)
