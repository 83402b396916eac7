"""Merge checkpoints of one origin without training, as a baseline: their average, or task arithmetic.

    python tools/merge_checkpoints.py average --out RUN/student CHECKPOINT CHECKPOINT ...
    python tools/merge_checkpoints.py task-arithmetic --scale 0.3 --base SFT --out RUN/student CHECKPOINT ...

    average          mean of the checkpoints
    task-arithmetic  base + scale * sum of (checkpoint - base)       (arXiv 2212.04089)

Checkpoints are Hugging Face folders with the same tensors and the same tokenizer. Then `mopd eval CONFIG
run.folder=RUN` scores the result. Promises (tests/unit/test_merge_checkpoints.py): sums are float64, results have the
type of the base's (the first checkpoint's) tensor; one tensor of each checkpoint is in memory at a time; OUT is
complete or absent; a second call with the same words finds it there, other words do not overwrite it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import torch

from megatron_mopd.cli import guarded
from megatron_mopd.errors import UserError
from megatron_mopd.hf_folder import StoredTensor, read_tensors
from megatron_mopd.teachers.identity import check_same_language

Combine = Callable[[torch.Tensor, Sequence[torch.Tensor]], torch.Tensor]
"""(base, checkpoints) to the result, all float64."""

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
RECIPE = "merge.json"
"""In OUT: what it was made of."""


def average(base: torch.Tensor, checkpoints: Sequence[torch.Tensor]) -> torch.Tensor:
    return _sum(checkpoints) / len(checkpoints)


def task_arithmetic(scale: float) -> Combine:
    return lambda base, checkpoints: base + scale * _sum([checkpoint - base for checkpoint in checkpoints])


def _sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros_like(tensors[0])
    for tensor in tensors:
        total += tensor
    return total


def merge(base: Path, checkpoints: Sequence[Path], combine: Combine, out: Path, recipe: Mapping[str, object]) -> bool:
    """Write OUT; False if it is there already, made by the same recipe. Raises UserError for checkpoints that do not
    fit together, and for an OUT that is something else."""
    if out.exists():
        _check_recipe(out, recipe)
        return False
    stored = [_tensors_by_name(folder) for folder in (base, *checkpoints)]
    for folder, tensors in zip(checkpoints, stored[1:], strict=True):
        check_same_language(base, folder, str(folder))
        _check_same_tensors(base, stored[0], folder, tensors)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for file in sorted(base.iterdir()):
        if file.is_file() and file.suffix != ".safetensors":
            shutil.copyfile(file, partial / file.name)
    for name in dict.fromkeys(tensor.file.name for tensor in stored[0].values()):
        of_file = [tensor for tensor in stored[0].values() if tensor.file.name == name]
        _write_file(partial / name, of_file, stored, combine)
    (partial / RECIPE).write_text(json.dumps(recipe, indent=2) + "\n")
    partial.rename(out)
    return True


def _check_recipe(out: Path, recipe: Mapping[str, object]) -> None:
    file = out / RECIPE
    if not file.is_file() or json.loads(file.read_text()) != recipe:
        raise UserError(f"{out} is there, and was not made by these words; remove it or choose another --out")


def _tensors_by_name(folder: Path) -> dict[str, StoredTensor]:
    tensors = {tensor.name: tensor for tensor in read_tensors(folder, str(folder))}
    for tensor in tensors.values():
        if tensor.dtype not in DTYPES:
            raise UserError(f"{folder}: {tensor.name} is {tensor.dtype}; merge checkpoints that are not quantized")
    return tensors


def _check_same_tensors(
    base: Path, ours: dict[str, StoredTensor], folder: Path, theirs: dict[str, StoredTensor]
) -> None:
    if other := sorted(ours.keys() ^ theirs.keys()):
        lacking = base if other[0] in theirs else folder
        raise UserError(f"{folder} and {base} are of different architectures: {lacking} has no {other[0]}")
    for name, tensor in ours.items():
        if tensor.shape != theirs[name].shape:
            raise UserError(
                f"{folder} and {base} are of different architectures: {name} is {list(theirs[name].shape)} and "
                f"{list(tensor.shape)}"
            )


def _write_file(
    file: Path, tensors: Sequence[StoredTensor], stored: Sequence[dict[str, StoredTensor]], combine: Combine
) -> None:
    """A safetensors file with the base's header, its tensors written one after the other."""
    with file.open("wb") as out:
        _write_header(out, tensors)
        for tensor in tensors:
            base, *checkpoints = (_read(of_folder[tensor.name]) for of_folder in stored)
            merged = combine(base, checkpoints).to(DTYPES[tensor.dtype])
            out.write(merged.reshape(-1).view(torch.uint8).numpy().tobytes())
        out.flush()
        os.fsync(out.fileno())


def _write_header(out: BinaryIO, tensors: Sequence[StoredTensor]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        offsets = [start, start := start + tensor.size]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the data
    out.write(len(text).to_bytes(8, "little") + text)


def _read(tensor: StoredTensor) -> torch.Tensor:
    with tensor.file.open("rb") as file:
        file.seek(tensor.start)
        data = bytearray(file.read(tensor.size))
    if not data:
        return torch.zeros(tensor.shape, dtype=torch.float64)
    return torch.frombuffer(data, dtype=DTYPES[tensor.dtype]).reshape(tensor.shape).double()


def main(words: list[str]) -> None:
    arguments = _parse(words)
    base = arguments.checkpoints[0] if arguments.method == "average" else arguments.base
    combine = average if arguments.method == "average" else task_arithmetic(arguments.scale)
    recipe = {"words": [str(word) for word in words]}
    made = merge(base, arguments.checkpoints, combine, arguments.out, recipe)
    print(f"{arguments.out}: {'written' if made else 'there already'}")


def _parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    methods = parser.add_subparsers(dest="method", required=True)
    for name in ("average", "task-arithmetic"):
        method = methods.add_parser(name)
        method.add_argument("checkpoints", nargs="+", type=Path)
        method.add_argument("--out", type=Path, required=True)
        if name == "task-arithmetic":
            method.add_argument("--base", type=Path, required=True)
            method.add_argument("--scale", type=float, required=True)
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(guarded(lambda: main(sys.argv[1:])))
