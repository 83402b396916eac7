"""A Hugging Face folder of bfloat16 or float32 weights into one with MXFP4 experts, and back.

An export records the rule of the scales, which no decoder needs, in config.json and in each file: two in one folder
mean that it is put together from several. Each file also records what a few of its blocks decode to. A wrong order of
nibbles leaves weights with the statistics of the right ones, so that only a record can show it; a folder that others
have written has none.

Promises (tests/unit/test_packed_folder.py): importing gives what `fake_quantize` gives, bit for bit; exporting that
again gives the same bytes; what cannot be packed, is packed already, has mixed rules or swapped nibbles is refused
before OUT appears.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from safetensors import SafetensorError
from torch import Tensor

from megatron_mopd.errors import UserError
from megatron_mopd.hf_folder import StoredTensor
from megatron_mopd.quantization.formats import BLOCK, NAN_BYTE, Mxfp4, Rule, decode_mxfp4, encode_mxfp4
from megatron_mopd.quantization.packed_layouts import (
    EXPERT,
    LAYOUTS,
    RULE_KEY,
    SUFFIXES,
    Layout,
    Packed,
    join,
    packed_of,
    quantization_config,
    split,
    weights_in,
)
from megatron_mopd.shard_files import HfFolder, ShardWriter, complete, make_empty, partial_of

RULES: tuple[Rule, ...] = get_args(Rule)
SHARD_BYTES = 4 << 30
BLOCKS_KEY = "mxfp4_blocks"
"""In the metadata of a file: tensor name to [number of a block, its 32 values]."""
_RECORDED, _SEARCHED = 4, 1024
"""Tensors of a file that are recorded; blocks of each among which one is looked for that shows the order."""


class Converted(NamedTuple):
    """What an export or import has written."""

    folder: Path
    expert_weights: int
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        before, after = self.bytes_before / 1e6, self.bytes_after / 1e6
        return f"{self.folder}: {self.expert_weights} expert weights, {before:.1f} MB -> {after:.1f} MB"


def export_packed(
    source: Path, out: Path, layout: str = "compressed-tensors", rule: str = "even", shard_bytes: int = SHARD_BYTES
) -> Converted:
    """Pack the weights of routed experts; everything else is copied. Raises UserError."""
    layout, rule = _layout(layout), _rule(rule)
    folder = HfFolder(source)
    experts = _experts(folder)
    try:
        units = packed_of(experts, layout)
    except ValueError as error:
        raise UserError(f"{source} does not fit the layout {layout}: {error}") from None
    others = folder.tensors.keys() - experts.keys()
    matrices = [name for name in others if name.endswith(".weight") and len(folder.tensors[name].shape) == 2]
    config = {**folder.config, "quantization_config": quantization_config(layout, rule, matrices)}
    with _new_folder(out, folder, config, shard_bytes, lambda tensors: _record(tensors, rule)) as writer:
        for name, unit in sorted([(unit.packed, unit) for unit in units] + [(name, None) for name in others]):
            writer.add({name: folder.tensor(name)} if unit is None else _pack(folder, unit, layout, rule))
    return Converted(out, len(experts), sum(t.size for t in folder.tensors.values()), writer.written.num_bytes)


def import_packed(source: Path, out: Path, shard_bytes: int = SHARD_BYTES) -> Converted:
    """The values of either layout, in the dtype of config.json. Raises UserError."""
    folder = HfFolder(source)
    units = {name: unit for name, t in folder.tensors.items() if (unit := weights_in(name, t.shape)) is not None}
    _refuse_unreadable(folder, units)
    _refuse_mixed_rules(folder)
    _refuse_other_values(folder)
    dtype, number = folder.dtype(), 0
    scales = {unit.scale for unit in units.values()}
    by_weight = [(unit.weights[0][0], unit) for unit in units.values()]
    others = [(name, None) for name in folder.tensors.keys() - units.keys() - scales]
    config = {key: value for key, value in folder.config.items() if key != "quantization_config"}
    with _new_folder(out, folder, config, shard_bytes) as writer:
        for name, unit in sorted([*by_weight, *others]):
            if unit is None:
                writer.add({name: folder.tensor(name)})
                continue
            for weight, code in split(_code(folder, unit), unit.weights):
                writer.add({weight: decode_mxfp4(code, dtype)})
                number += 1
    return Converted(out, number, sum(t.size for t in folder.tensors.values()), writer.written.num_bytes)


@contextmanager
def _new_folder(
    out: Path,
    source: HfFolder,
    config: Mapping[str, Any],
    shard_bytes: int,
    metadata: Callable[[Mapping[str, Tensor]], dict[str, str]] = lambda _: {},
) -> Iterator[ShardWriter]:
    """What is added goes to `out`, which takes its place at the end, with what else `source` has and another config."""
    if out.exists():
        raise UserError(f"{out} is there already; remove it or name another folder")
    partial = partial_of(out)
    try:
        make_empty(partial)
        writer = ShardWriter(partial, shard_bytes, metadata=metadata)
        yield writer
        writer.flush()
        complete(partial, source.path, [writer.written])
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        partial.rename(out)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{out} cannot be written: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _layout(name: str) -> Layout:
    for layout in LAYOUTS:
        if layout == name:
            return layout
    raise UserError(f"unknown layout {name!r}; choose from {', '.join(LAYOUTS)}")


def _rule(name: str) -> Rule:
    for rule in RULES:
        if rule == name:
            return rule
    raise UserError(f"unknown rule {name!r}; choose from {', '.join(RULES)}")


def _experts(folder: HfFolder) -> dict[str, tuple[int, ...]]:
    """Name and shape of every routed expert's weight."""
    if config := folder.config.get("quantization_config"):
        method = config.get("quant_method")
        raise UserError(f"{folder.path} is quantized already ({method}); import it first, or name its source")
    experts = {name: t for name, t in folder.tensors.items() if EXPERT.fullmatch(name)}
    if not experts:
        raise UserError(f"{folder.path} has no experts (...experts.0.gate_proj.weight); there is nothing to pack")
    for name, t in experts.items():
        if t.dtype not in ("BF16", "F32"):
            raise UserError(f"{folder.path}: {name} is {t.dtype}; MXFP4 is made of BF16 or F32")
        if len(t.shape) != 2 or t.shape[1] % BLOCK:
            raise UserError(
                f"{folder.path}: {name} is {list(t.shape)}; MXFP4 needs columns in multiples of {BLOCK}: keep this "
                "model's experts unpacked"
            )
    return {name: t.shape for name, t in experts.items()}


def _pack(folder: HfFolder, unit: Packed, layout: Layout, rule: Rule) -> dict[str, Tensor]:
    codes = [[encode_mxfp4(folder.tensor(name), rule) for name in parts] for parts in unit.weights]
    for parts, of_parts in zip(unit.weights, codes, strict=True):
        for name, code in zip(parts, of_parts, strict=True):
            if (code.scale >= 253).any():
                raise UserError(f"{folder.path}: {name} holds NaN or infinity; use another checkpoint")
    joined = join(layout, codes)
    return {unit.packed: joined.packed, unit.scale: joined.scale}


def _code(folder: HfFolder, unit: Packed) -> Mxfp4:
    code = Mxfp4(folder.tensor(unit.packed), folder.tensor(unit.scale))
    if (code.scale == NAN_BYTE).any():
        raise UserError(f"{folder.path}: {unit.scale} holds NaN; use another checkpoint")
    return code


def _refuse_unreadable(folder: HfFolder, units: Mapping[str, Packed]) -> None:
    if not units:
        raise UserError(f"{folder.path} has no MXFP4 tensors (.weight_packed or _blocks); there is nothing to import")
    for name, unit in units.items():
        packed, scale = folder.tensors[name], folder.tensors.get(unit.scale)
        if scale is None:
            raise UserError(f"{folder.path}: {name} has no {unit.scale}; copy the checkpoint again")
        if not _is_mxfp4(unit, packed, scale):
            raise UserError(
                f"{folder.path}: {name} {packed.dtype} {list(packed.shape)} and its scales {scale.dtype} "
                f"{list(scale.shape)} are not MXFP4; import checkpoints of mxfp4-pack-quantized or gpt-oss"
            )
    plain = {name for unit in units.values() for parts in unit.weights for name in parts} & folder.tensors.keys()
    if plain:
        raise UserError(f"{folder.path} holds {min(plain)} twice, packed and plain; remove the files of one of the two")
    if biases := sorted(name for name in folder.tensors if name.endswith("_proj_bias")):
        raise UserError(f"{folder.path}: {biases[0]}: experts with biases are not of a family that is known")


def _is_mxfp4(unit: Packed, packed: StoredTensor, scale: StoredTensor) -> bool:
    shape = packed.shape
    if len(shape) == 4 and shape[3] == BLOCK // 2 and shape[0] > 0:
        rows, columns = shape[:2], shape[2] * shape[3]
    elif len(shape) == 2:
        rows, columns = shape[:1], shape[1]
    else:
        return False
    fits = columns % (BLOCK // 2) == 0 and scale.shape == (*rows, columns // (BLOCK // 2))
    return packed.dtype == scale.dtype == "U8" and fits and rows[-1] % len(unit.weights[0]) == 0


def _refuse_mixed_rules(folder: HfFolder) -> None:
    config: Any = folder.config.get("quantization_config") or {}
    ours = {file: found for file, found in folder.metadata().items() if RULE_KEY in found}
    rules = {str(found[RULE_KEY]) for found in (config, *ours.values()) if RULE_KEY in found}
    if len(rules) > 1:
        raise UserError(
            f"{folder.path} mixes the rules {', '.join(sorted(rules))}; export the whole checkpoint again, by one rule"
        )
    if RULE_KEY in config and len(ours) < len(folder.metadata()):
        raise UserError(f"{folder.path} has files of another origin than its config.json; export it again")


def _record(tensors: Mapping[str, Tensor], rule: Rule) -> dict[str, str]:
    """The metadata of a file."""
    found: dict[str, tuple[int, list[float]]] = {}
    for name, packed in tensors.items():
        scale_name = _scale_of(name)
        if scale_name is None or len(found) == _RECORDED:
            continue
        blocks = packed.reshape(-1, BLOCK // 2)[:_SEARCHED]
        told_apart = (blocks != _swapped(blocks)).any(dim=-1).nonzero()
        if len(told_apart):
            block = int(told_apart[0])
            found[name] = block, _values(packed, tensors[scale_name], block)
    return {RULE_KEY: rule, BLOCKS_KEY: json.dumps(found)}


def _refuse_other_values(folder: HfFolder) -> None:
    for file, metadata in folder.metadata().items():
        for name, (block, want) in json.loads(metadata.get(BLOCKS_KEY, "{}")).items():
            scale_name = _scale_of(name)
            if scale_name is None or name not in folder.tensors or scale_name not in folder.tensors:
                raise UserError(f"{file} has no {name}, which it was written with; export the checkpoint again")
            packed, scale = folder.tensor(name), folder.tensor(scale_name)
            if _values(packed, scale, block) == want:
                continue
            if _values(_swapped(packed), scale, block) == want:
                raise UserError(f"{file}: {name} has its nibbles in the wrong order; the even index is the low one")
            raise UserError(f"{file}: {name} does not decode to what was exported; export the checkpoint again")


def _scale_of(name: str) -> str | None:
    for suffix, of_scale in SUFFIXES.items():
        if name.endswith(suffix):
            return name.removesuffix(suffix) + of_scale
    return None


def _values(packed: Tensor, scale: Tensor, block: int) -> list[float]:
    code = Mxfp4(packed.reshape(-1, BLOCK // 2)[block], scale.reshape(-1)[block : block + 1])
    return decode_mxfp4(code, torch.float32).tolist()


def _swapped(packed: Tensor) -> Tensor:
    return packed << 4 | packed >> 4
