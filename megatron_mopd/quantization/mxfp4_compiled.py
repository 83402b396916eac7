"""MXFP4 on a CPU in one pass: mxfp4.c, if there was a C compiler when this package was installed.

Promises (tests/unit/test_mxfp4_compiled.py): the bits that the operations of formats.py give.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

BLOCK = 32
_BYTES = {torch.bfloat16: 2, torch.float32: 4}


@cache
def compiled() -> ctypes.CDLL | None:
    """mxfp4.c; None where it was not compiled."""
    spec = find_spec("megatron_mopd.quantization._mxfp4")
    if spec is None or spec.origin is None:
        return None
    library = ctypes.CDLL(spec.origin)
    p, i64, i32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    library.fake_quantize.argtypes, library.fake_quantize.restype = (p, p, i64, i32, i32, i32), None
    library.encode.argtypes, library.encode.restype = (p, p, p, i64, i32, i32, i32), None
    return library


def applies_to(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and compiled() is not None


def fake_quantize(weight: Tensor, round_up: int, of_infinity: int) -> Tensor:
    """Of a tensor whose rows are whole blocks; the rule as two numbers, as in formats.py."""
    library, weight = compiled(), weight.detach().contiguous()
    assert library is not None
    out, blocks = torch.empty_like(weight), weight.numel() // BLOCK
    library.fake_quantize(weight.data_ptr(), out.data_ptr(), blocks, _BYTES[weight.dtype], round_up, of_infinity)
    return out


def encode(weight: Tensor, round_up: int, of_infinity: int) -> tuple[Tensor, Tensor]:
    """(packed, scale)."""
    library, weight = compiled(), weight.detach().contiguous()
    assert library is not None
    *rows, k = weight.shape
    packed = torch.empty(*rows, k // 2, dtype=torch.uint8)
    scale = torch.empty(*rows, k // BLOCK, dtype=torch.uint8)
    library.encode(
        *(weight.data_ptr(), packed.data_ptr(), scale.data_ptr(), weight.numel() // BLOCK),
        *(_BYTES[weight.dtype], round_up, of_infinity),
    )
    return packed, scale
