"""MXFP4: E2M1 elements in blocks of 32 along the last dimension, which share a power-of-two scale (E8M0).

An element is one of 0, .5, 1, 1.5, 2, 3, 4, 6 with a sign, rounded to nearest, ties to even, larger ones to 6. Two
share a byte, the even index in the low nibble. A scale's byte s is 2^(s - 127). All decoders agree; encoders differ in
the scale that they choose for the largest magnitude `amax` of a block:

    floor   2^(floor(log2 amax) - 2)                                   the OCP specification
    even    the same, twice as large where amax / 2^floor >= 1.75      compressed-tensors, Quark
    rceil   2^ceil(log2(amax / 6)), so that nothing exceeds 6          ModelOpt, Transformer Engine

Exponents are integer bits of the float32 value: logarithms in floating point are off by one next to powers of two.

Special blocks: amax = 0 has scale byte 0, and zeros keep their signs. Below the smallest scale, bytes stay at 0 and
elements are multiples of 2^-128. An infinity counts as 2^128 (byte 253; with rceil 254) and comes back as infinity, as
does what `even` rounds to 2^128. A NaN makes its block NaN: scale byte 255, elements 0.

Promises (tests/oracles/test_mxfp4.py): the bytes of compressed-tensors (even) and torchao (each rule); fake_quantize
equals decode_mxfp4(encode_mxfp4(w)) bit for bit; quantizing again changes no value, under any rule. On a CPU
mxfp4_compiled.py does the same in one pass.
Shape suffixes: N = blocks, B = the 32 elements of one.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megatron_mopd.quantization import mxfp4_compiled

Rule = Literal["floor", "even", "rceil"]
BLOCK = mxfp4_compiled.BLOCK
DTYPES = (torch.float32, torch.bfloat16)

_INFINITY, _SIGNLESS = 0x7F800000, 0x7FFFFFFF
"""Of the bits of a float32."""
_RULES = {"floor": (0, 253), "even": (0x200000, 253), "rceil": (0x3FFFFF, 254)}
"""What is added to the bits of amax, so that it carries into the exponent from 1.75 on (even) or above 1.5 (rceil); and
the scale byte of infinity."""
NAN_BYTE = 255
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Mxfp4(NamedTuple):
    """A tensor [..., K]; for example, 64 ones have packed = [0x66] * 32 and scale = [125, 125]."""

    packed: Tensor  # uint8 [..., K/2]
    scale: Tensor  # uint8 [..., K/32]


def encode_mxfp4(weight: Tensor, rule: Rule = "even") -> Mxfp4:
    """Of float32 or bfloat16 [..., K]. Raises ValueError for other types, for K that is no multiple of 32, and for an
    unknown rule."""
    check(weight, rule)
    if mxfp4_compiled.applies_to(weight):
        return Mxfp4(*mxfp4_compiled.encode(weight, *_RULES[rule]))
    x_NB = blocks_of(weight)
    scale_N1 = scale_bytes(x_NB, 2, *_RULES[rule])
    code_NB = _codes(_rounded(x_NB, scale_N1)) | (x_NB.view(torch.int32) >> 28 & 8)
    code_NB.masked_fill_(scale_N1 == NAN_BYTE, 0)
    packed = (code_NB[:, 0::2] | code_NB[:, 1::2] << 4).to(torch.uint8)
    *rows, k = weight.shape
    return Mxfp4(packed.reshape(*rows, k // 2), scale_N1.to(torch.uint8).reshape(*rows, k // BLOCK))


def decode_mxfp4(code: Mxfp4, dtype: torch.dtype) -> Tensor:
    """The values [..., K], exact in float32 and bfloat16. Raises ValueError for other types, and for parts that are not
    of one tensor."""
    if dtype not in DTYPES:
        raise ValueError(f"MXFP4 decodes to float32 or bfloat16, not {dtype}")
    *rows, half = code.packed.shape
    if code.packed.dtype != torch.uint8 or code.scale.dtype != torch.uint8:
        raise ValueError(f"MXFP4 is stored as uint8, not {code.packed.dtype} and {code.scale.dtype}")
    if half * 2 % BLOCK or code.scale.shape != (*rows, half * 2 // BLOCK):
        raise ValueError(f"MXFP4 of {list(code.packed.shape)} bytes cannot have scales {list(code.scale.shape)}")
    values = torch.tensor([*_VALUES, *(-x for x in _VALUES)], device=code.packed.device)
    code_NB = torch.stack((code.packed & 15, code.packed >> 4), dim=-1).reshape(-1, BLOCK)
    scale_N1 = code.scale.reshape(-1, 1).int()
    x_NB = values[code_NB.int()] * powers_of_two(scale_N1)
    return _as(dtype, x_NB, scale_N1).reshape(*rows, half * 2)


def fake_quantize(weight: Tensor, rule: Rule = "even") -> Tensor:
    """`decode_mxfp4(encode_mxfp4(weight, rule), weight.dtype)`, without the bytes between. Raises as they do."""
    check(weight, rule)
    if mxfp4_compiled.applies_to(weight):
        return mxfp4_compiled.fake_quantize(weight, *_RULES[rule])
    x_NB = blocks_of(weight)
    scale_N1 = scale_bytes(x_NB, 2, *_RULES[rule])
    y_NB = _rounded(x_NB, scale_N1).copysign_(x_NB).mul_(powers_of_two(scale_N1))
    return _as(weight.dtype, y_NB, scale_N1).reshape(weight.shape)


def is_on_grid(weight: Tensor) -> bool:
    """It has values of MXFP4 already, whichever rule has chosen them: quantizing them by any changes none."""
    fits = weight.dtype in DTYPES and weight.dim() > 0 and weight.shape[-1] % BLOCK == 0
    return fits and torch.equal(fake_quantize(weight), weight)


def _as(dtype: torch.dtype, x_NB: Tensor, scale_N1: Tensor) -> Tensor:
    """With one NaN; casts make several."""
    return x_NB.to(dtype).masked_fill_(scale_N1 == NAN_BYTE, torch.nan)


def check(weight: Tensor, rule: str, rules: Collection[str] = tuple(_RULES)) -> None:
    """Raises ValueError for what an MX format cannot encode."""
    if rule not in rules:
        raise ValueError(f"unknown MX rule {rule!r}; choose from {', '.join(rules)}")
    if weight.dtype not in DTYPES:
        raise ValueError(f"an MX format encodes float32 or bfloat16, not {weight.dtype}")
    if weight.dim() == 0 or weight.shape[-1] % BLOCK:
        raise ValueError(
            f"an MX format needs rows of a multiple of {BLOCK} elements, this tensor is {list(weight.shape)}"
        )


def blocks_of(weight: Tensor) -> Tensor:
    """Float32 [N, 32]."""
    return weight.detach().reshape(-1, BLOCK).float()


def scale_bytes(x_NB: Tensor, largest_exponent: int, round_up: int, of_infinity: int) -> Tensor:
    """Int32 [N, 1], for elements below 2^(largest_exponent + 1) and a rule's two numbers."""
    amax_N1 = (x_NB.view(torch.int32) & _SIGNLESS).amax(dim=-1, keepdim=True)  # NaN are above infinity
    scale_N1 = ((amax_N1.clamp(max=_INFINITY) + round_up) >> 23).sub_(largest_exponent).clamp_(min=0)
    scale_N1.masked_fill_(amax_N1 == _INFINITY, of_infinity)
    return scale_N1.masked_fill_(amax_N1 > _INFINITY, NAN_BYTE)


def _rounded(x_NB: Tensor, scale_N1: Tensor) -> Tensor:
    """|x| / scale as the nearest E2M1 value."""
    y_NB = (x_NB * powers_of_two(254 - scale_N1)).abs_().clamp_(max=_VALUES[-1])
    # The step is half the power of two below y, at least .5. A float32 of 2^23 steps has no digits below one.
    shift_NB = (y_NB.view(torch.int32) & _INFINITY).view(torch.float32).clamp_(min=1).mul_(1.5 * 2**22)
    return y_NB.add_(shift_NB).sub_(shift_NB)


def _codes(y_NB: Tensor) -> Tensor:
    """The three low bits of an E2M1 value, without its sign: from 1 on they are bits of the float32."""
    return ((y_NB.view(torch.int32) >> 22) - 252).maximum((y_NB > 0).int())


def powers_of_two(byte_N1: Tensor) -> Tensor:
    """2^(byte - 127) as float32; 255 is NaN. Byte 0 (also of the inverse of 254) is the one subnormal."""
    bits_N1 = (byte_N1 << 23).masked_fill_(byte_N1 <= 0, 0x400000)
    return bits_N1.masked_fill_(byte_N1 == NAN_BYTE, 0x7FC00000).view(torch.float32)
