"""FP8 with float32 scales, of a tensor or of tiles, and MXFP8 with a power-of-two scale (E8M0) per 32 elements.

    fp8     x ~ values * scale, scale = amax / (the largest element): 448 for E4M3, 57344 for E5M2
    mxfp8   E4M3 elements in blocks as in formats.py; floor: 2^(floor(log2 amax) - 8), rceil: 2^ceil(log2(amax / 448))

Elements are rounded to nearest, ties to even. FP8: a scale of zeros is 1; what is not finite makes its tile NaN.
Special blocks of MXFP8 are as in formats.py, except that all elements of a NaN block are NaN.
Promises (tests/oracles/test_fp8.py): bytes of torchao (MXFP8); errors of at most half a step; tiles need not divide the
tensor.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megatron_mopd.quantization.formats import BLOCK, NAN_BYTE, blocks_of, check, powers_of_two, scale_bytes

Element = Literal["e4m3", "e5m2"]
Mxfp8Rule = Literal["floor", "rceil"]
ELEMENTS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
TILE = 128
"""Of DeepSeek-V3: 128 x 128 of a weight, 1 x 128 of an activation."""

_RULES = {"floor": (0, 247), "rceil": (0x1FFFFF, 254)}
"""As in formats.py; rceil carries into the exponent above 1.75, as 448 is 1.75 * 2^8."""


class Fp8(NamedTuple):
    values: Tensor  # float8 [..., K]
    scale: Tensor  # float32: [] of the tensor, or [ceil(rows / tile rows), ceil(K / tile columns)]


class Mxfp8(NamedTuple):
    values: Tensor  # float8_e4m3fn [..., K]
    scale: Tensor  # uint8 [..., K/32]


def encode_fp8(x: Tensor, element: Element = "e4m3", tile: tuple[int, int] | None = None) -> Fp8:
    """Of a tensor as a whole, or of a matrix in tiles (rows, columns), which need not divide it."""
    dtype, largest = ELEMENTS[element], torch.finfo(ELEMENTS[element]).max
    tiled = x.float() if tile is None else _tiles(x.float(), tile)
    amax = tiled.abs().amax() if tile is None else tiled.abs().amax(dim=(1, 3))
    scale = torch.where(amax > 0, amax / largest, 1.0).clamp(min=torch.finfo(torch.float32).tiny)
    scale = scale.masked_fill(~amax.isfinite(), torch.nan)
    return Fp8((x.float() / _spread(scale, x, tile)).clamp(-largest, largest).to(dtype), scale)


def decode_fp8(code: Fp8, dtype: torch.dtype, tile: tuple[int, int] | None = None) -> Tensor:
    """With the tile that it was encoded with."""
    return (code.values.float() * _spread(code.scale, code.values, tile)).to(dtype)


def encode_mxfp8(x: Tensor, rule: Mxfp8Rule = "rceil") -> Mxfp8:
    """Of float32 or bfloat16 [..., K]; rceil is what GPUs with MXFP8 do. Raises ValueError as `encode_mxfp4` does."""
    check(x, rule, _RULES)
    x_NB = blocks_of(x)
    scale_N1 = scale_bytes(x_NB, 8, *_RULES[rule])
    largest = torch.finfo(torch.float8_e4m3fn).max
    y_NB = (x_NB * powers_of_two(254 - scale_N1)).clamp_(-largest, largest)
    y_NB.masked_fill_(scale_N1 == NAN_BYTE, torch.nan)
    values = y_NB.to(torch.float8_e4m3fn).reshape(x.shape)
    return Mxfp8(values, scale_N1.to(torch.uint8).reshape(*x.shape[:-1], x.shape[-1] // BLOCK))


def decode_mxfp8(code: Mxfp8, dtype: torch.dtype) -> Tensor:
    """The values [..., K], exact in float32 and bfloat16."""
    x_NB = code.values.float().reshape(-1, BLOCK) * powers_of_two(code.scale.reshape(-1, 1).int())
    return x_NB.to(dtype).reshape(code.values.shape)


def _tiles(x: Tensor, tile: tuple[int, int]) -> Tensor:
    """[tiles down, rows, tiles across, columns], padded with zeros, which change no maximum."""
    (down, across), (rows, columns) = _grid(x, tile), tile
    padded = torch.nn.functional.pad(x, (0, across * columns - x.shape[1], 0, down * rows - x.shape[0]))
    return padded.reshape(down, rows, across, columns)


def _spread(scale: Tensor, x: Tensor, tile: tuple[int, int] | None) -> Tensor:
    """The scale of each element."""
    if tile is None:
        return scale
    if scale.shape != (grid := _grid(x, tile)):
        raise ValueError(f"{list(x.shape)} in tiles of {list(tile)} has scales {list(grid)}, not {list(scale.shape)}")
    rows, columns = x.shape
    return scale.repeat_interleave(tile[0], 0)[:rows].repeat_interleave(tile[1], 1)[:, :columns]


def _grid(x: Tensor, tile: tuple[int, int]) -> tuple[int, int]:
    if x.dim() != 2:
        raise ValueError(f"only a matrix has tiles, this tensor is {list(x.shape)}")
    return math.ceil(x.shape[0] / tile[0]), math.ceil(x.shape[1] / tile[1])
