"""A Hugging Face folder into Megatron models, and back into a folder that transformers and SGLang read.

Promises (tests/distributed/test_weights.py): loading then exporting gives the same tensors bit for bit in every layout;
a folder that does not match the model is refused before anything is written; no parameter is left unset; nothing larger
than one tensor (loading) or one shard (export) is held beside the model; a reader never sees a half-written folder.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_mopd.errors import UserError
from megatron_mopd.hf_folder import INDEX_FILE, copy_all_but_weights, let_others_read, read_hf_config
from megatron_mopd.mcore.families import family_of
from megatron_mopd.mcore.parallel import on_rank_zero
from megatron_mopd.mcore.parameters import Parameter, geometry_of, parameters_of
from megatron_mopd.mcore.sharding import Geometry
from megatron_mopd.mcore.stream import HfStream
from megatron_mopd.quantization.policy import refuse_packed

# isort: split
from megatron.core.models.gpt import GPTModel

SHARD_BYTES = 4 << 30
"""A shard file is closed once it holds this much."""


def load_hf(models: Sequence[GPTModel], folder: Path) -> None:
    """Fill this rank's parameters from a Hugging Face checkpoint, tensor by tensor, cast to the parameter's dtype.

    Collective. Raises the same UserError on every rank where the folder is no checkpoint, or where tensors are missing,
    unknown or of another shape; then no parameter was touched.
    """
    folder = Path(folder)
    hf_config = read_hf_config(folder)
    refuse_packed(folder, hf_config, "checkpoint")
    _refuse_another_architecture(models, hf_config)
    checkpoint = Checkpoint(folder)
    parameters, geometry = parameters_of(models, hf_config), geometry_of(models, hf_config)
    _refuse_mismatch(checkpoint, parameters, geometry)
    for parameter in parameters:
        parameter.tensor.fill_(math.nan)
    for parameter in parameters:
        full = [checkpoint.tensor(name) for name in parameter.hf_names]
        group = parameter.group
        parameter.tensor.copy_(parameter.sharding.shard(full, geometry, group.rank(), group.size()))
    if unset := [p for p in parameters if p.tensor.isnan().any()]:
        raise UserError(f"checkpoint {folder} holds NaN in {', '.join(unset[0].hf_names)}; use another checkpoint")


def _refuse_another_architecture(models: Sequence[GPTModel], hf_config: Mapping[str, Any]) -> None:
    """A `megatron:` option that changes what the model computes would part it from the engine that samples."""
    for name, value in family_of(hf_config).architecture(hf_config).transformer.items():
        built = getattr(models[0].config, name)
        if built != value:
            raise UserError(
                f"megatron.{name}={built!r} contradicts the checkpoint's config.json ({value!r}); remove it"
            )


class Checkpoint:
    """Reads single tensors of a safetensors folder, sharded or not."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._open: dict[str, Any] = {}

    @cached_property
    def file_of(self) -> dict[str, str]:
        """Tensor name to file name."""
        if (self.folder / INDEX_FILE).is_file():
            return json.loads((self.folder / INDEX_FILE).read_text())["weight_map"]
        files = sorted(self.folder.glob("*.safetensors"))
        return {name: file.name for file in files for name in list(self._file(file.name).keys())}

    def _file(self, name: str) -> Any:
        if name not in self._open:
            try:
                self._open[name] = safe_open(self.folder / name, framework="pt")
            except (SafetensorError, OSError) as error:
                raise UserError(f"{self.folder / name} is not a safetensors file: {error}") from None
        return self._open[name]

    def problem(self, name: str, shape: tuple[int, ...]) -> str | None:
        """What keeps the tensor from being read at this shape."""
        if name not in self.file_of:
            return f"{name} is missing"
        try:
            got = self._file(self.file_of[name]).get_slice(name).get_shape()
        except (SafetensorError, UserError) as error:
            return f"{name} cannot be read: {error}"
        return None if tuple(got) == shape else f"{name} is {got}, the model needs {list(shape)}"

    def tensor(self, name: str) -> Tensor:
        return self._file(self.file_of[name]).get_tensor(name)


def _refuse_mismatch(checkpoint: Checkpoint, parameters: Sequence[Parameter], geometry: Geometry) -> None:
    wanted, problems = set(), []
    for parameter in parameters:
        shapes = parameter.sharding.shapes(tuple(parameter.tensor.shape), geometry, parameter.group.size())
        for name, shape in zip(parameter.hf_names, shapes, strict=True):
            wanted.add(name)
            if problem := checkpoint.problem(name, shape):
                problems.append(problem)
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (wanted, problems))
    known = set().union(*(names for names, _ in of_ranks))
    found = sorted({problem for _, of_rank in of_ranks for problem in of_rank})
    found += [f"{name} is not a tensor of this model" for name in sorted(checkpoint.file_of.keys() - known)]
    if found:
        more = f"; and {len(found) - 8} more" if len(found) > 8 else ""
        raise UserError(f"checkpoint {checkpoint.folder} does not match its config.json: {'; '.join(found[:8])}{more}")


def export_hf(
    models: Sequence[GPTModel],
    source_folder: Path,
    out_folder: Path,
    value_of: Callable[[Parameter], Tensor] = attrgetter("tensor"),
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the models as a Hugging Face folder, with config, tokenizer and templates of `source_folder`.

    Collective, and complete on every rank when it returns. Each owner of (expert-) tensor-parallel slices gathers them
    and writes its own shard files beside `out_folder`; rank 0 adds the index and renames, replacing an older folder of
    that name. `value_of` a parameter is what is written of it.
    """
    source_folder, out_folder = Path(source_folder), Path(out_folder)
    partial = out_folder.with_name(f".{out_folder.name}.partial")
    on_rank_zero(lambda: _make_empty(partial))
    writer = _ShardWriter(partial, shard_bytes)
    for name, tensor in HfStream(models, source_folder, value_of).all():
        writer.add(name, tensor)
    writer.flush()
    of_ranks: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object((writer.file_of, writer.total_bytes), of_ranks)

    def complete() -> None:
        assert of_ranks is not None
        _write_index(partial, of_ranks)
        copy_all_but_weights(source_folder, partial)
        _replace(partial, out_folder)

    on_rank_zero(complete)


class _ShardWriter:
    def __init__(self, folder: Path, shard_bytes: int):
        self.folder, self.shard_bytes = folder, shard_bytes
        self.file_of: dict[str, str] = {}
        self.total_bytes = 0
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._files = 0

    def add(self, name: str, tensor: Tensor) -> None:
        # A copy of its own: safetensors refuses tensors that share storage.
        self._pending[name] = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
        self._pending_bytes += tensor.nbytes
        if self._pending_bytes >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        if not self._pending:
            return
        file = f"model-{dist.get_rank():05d}-{self._files:05d}.safetensors"
        save_file(self._pending, self.folder / file, metadata={"format": "pt"})
        let_others_read(self.folder / file)
        self.file_of |= dict.fromkeys(self._pending, file)
        self.total_bytes += self._pending_bytes
        self._files += 1
        self._pending, self._pending_bytes = {}, 0


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _write_index(folder: Path, of_ranks: Sequence[tuple[dict[str, str], int]]) -> None:
    weight_map = {name: file for file_of, _ in of_ranks for name, file in file_of.items()}
    assert len(weight_map) == sum(len(file_of) for file_of, _ in of_ranks), "two ranks wrote one tensor"
    index = {"metadata": {"total_size": sum(b for _, b in of_ranks)}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2))


def _replace(partial: Path, folder: Path) -> None:
    """Rename; where the folder exists, it steps aside first, so that no moment has half of each."""
    if folder.exists():
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old)
    else:
        partial.rename(folder)
