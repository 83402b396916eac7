"""FP8 in tiles and MXFP8: bytes of torchao, half a step of error, special values."""

from __future__ import annotations

import pytest
import torch
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx  # pyright: ignore[reportMissingImports]

from megatron_mopd.quantization.formats_fp8 import (
    ELEMENTS,
    TILE,
    Element,
    Fp8,
    Mxfp8Rule,
    decode_fp8,
    decode_mxfp8,
    encode_fp8,
    encode_mxfp8,
)


def matrix(rows: int, columns: int) -> torch.Tensor:
    """Of widely different magnitudes."""
    g = torch.Generator().manual_seed(0)
    return torch.randn(rows, columns, generator=g) * (torch.randn(rows, columns, generator=g) * 3).exp()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", ["floor", "rceil"])
def test_mxfp8_bytes_are_those_of_torchao(rule: Mxfp8Rule, dtype: torch.dtype) -> None:
    x = matrix(64, 256).to(dtype)
    x[0], x[1, 5], x[2, 5], x[3] = 0.0, torch.inf, torch.nan, -0.0
    scale, values = to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode[rule.upper()])
    ours = encode_mxfp8(x, rule)
    assert torch.equal(ours.scale, scale.view(torch.uint8))
    number = (ours.scale != 255).repeat_interleave(32, -1)  # elsewhere elements are any
    assert torch.equal(ours.values.view(torch.uint8)[number], values.view(torch.uint8)[number])
    decoded = decode_mxfp8(ours, dtype)
    assert torch.equal(decode_mxfp8(encode_mxfp8(decoded[3:], rule), dtype), decoded[3:])


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("tile", [None, (TILE, TILE), (1, TILE), (48, 80)])
def test_fp8_errs_by_half_a_step(element: Element, tile: tuple[int, int] | None) -> None:
    x = matrix(200, 300)
    code = encode_fp8(x, element, tile)
    assert code.scale.shape == (() if tile is None else (-(-200 // tile[0]), -(-300 // tile[1])))
    error = (decode_fp8(code, torch.float32, tile) - x).abs()
    digits, smallest = (3, 2.0**-9) if element == "e4m3" else (2, 2.0**-16)
    scale = decode_fp8(Fp8(torch.ones_like(code.values), code.scale), torch.float32, tile)
    assert (error <= torch.maximum(x.abs() * 2.0**-digits, smallest * scale) / 2 * 1.001).all()
    assert code.values.float().abs().max() == torch.finfo(ELEMENTS[element]).max


def test_special_values_of_fp8() -> None:
    x = torch.zeros(256, 128)
    assert encode_fp8(x).scale == 1
    x[0, 0] = torch.nan
    decoded = decode_fp8(encode_fp8(x, "e4m3", (TILE, TILE)), torch.bfloat16, (TILE, TILE))
    assert decoded[:128].isnan().all()
    assert decoded[128:].eq(0).all()
    x[0, 0] = 1e-45
    assert decode_fp8(encode_fp8(x), torch.float32).isfinite().all()


def test_mistakes_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="unknown MX rule 'even'; choose from floor, rceil"):
        encode_mxfp8(torch.zeros(2, 32), "even")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"multiple of 32 elements, this tensor is \[2, 40\]"):
        encode_mxfp8(torch.zeros(2, 40))
    with pytest.raises(ValueError, match="only a matrix has tiles"):
        encode_fp8(torch.zeros(2, 3, 4), "e4m3", (TILE, TILE))
    with pytest.raises(ValueError, match=r"has scales \[2, 3\], not \[2, 2\]"):
        decode_fp8(Fp8(torch.zeros(256, 300).to(torch.float8_e4m3fn), torch.ones(2, 2)), torch.float32, (TILE, TILE))
