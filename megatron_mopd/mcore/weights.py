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

import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_mopd.errors import UserError
from megatron_mopd.hf_folder import INDEX_FILE, read_hf_config
from megatron_mopd.mcore.families import family_of
from megatron_mopd.mcore.parallel import on_rank_zero
from megatron_mopd.mcore.parameters import Parameter, geometry_of, parameters_of
from megatron_mopd.mcore.sharding import Geometry
from megatron_mopd.mcore.stream import HfStream
from megatron_mopd.quantization.policy import refuse_packed
from megatron_mopd.shard_files import ShardWriter, complete, make_empty, partial_of

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
    partial = partial_of(out_folder)
    on_rank_zero(lambda: make_empty(partial))
    writer = ShardWriter(partial, shard_bytes, dist.get_rank())
    for name, tensor in HfStream(models, source_folder, value_of).all():
        writer.add({name: tensor})
    writer.flush()
    of_ranks: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(writer.written, of_ranks)

    def take_place() -> None:
        assert of_ranks is not None
        complete(partial, source_folder, of_ranks)
        _replace(partial, out_folder)

    on_rank_zero(take_place)


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
