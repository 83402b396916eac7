"""MXFP4 bytes are those of compressed-tensors and torchao; the laws of quantization hold for every special value."""

from __future__ import annotations

import math

import pytest
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx  # pyright: ignore[reportMissingImports]

from megatron_mopd.quantization.formats import BLOCK, DTYPES, Mxfp4, Rule, decode_mxfp4, encode_mxfp4, fake_quantize

RULES: tuple[Rule, ...] = ("floor", "even", "rceil")
INTEGER = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0)
"""Between elements; where `even` and rceil change the scale; where `floor` saturates."""
POWERS = torch.tensor([2.0 ** (byte - 127) for byte in range(255)] + [math.nan], dtype=torch.float64)
"""What scale bytes mean."""
dtypes = st.sampled_from(DTYPES)
rules = st.sampled_from(RULES)
few = settings(max_examples=40)
"""Each has up to eight blocks."""


def normal(g: torch.Generator) -> Tensor:
    return torch.randn(BLOCK, generator=g) * 2.0 ** int(torch.randint(-20, 20, (1,), generator=g))


def signed_zeros(g: torch.Generator) -> Tensor:
    return torch.zeros(BLOCK).copysign(torch.randn(BLOCK, generator=g))


def tiny(g: torch.Generator) -> Tensor:
    """Around the smallest scale and the subnormal numbers."""
    return torch.randn(BLOCK, generator=g) * 2.0 ** int(torch.randint(-149, -118, (1,), generator=g))


def huge(g: torch.Generator) -> Tensor:
    return torch.randn(BLOCK, generator=g).clamp(-1, 1) * torch.finfo(torch.float32).max


def ties(g: torch.Generator) -> Tensor:
    points = torch.tensor(MIDPOINTS)[torch.randint(len(MIDPOINTS), (BLOCK,), generator=g)]
    points = points.view(torch.int32) + torch.randint(-1, 2, (BLOCK,), generator=g, dtype=torch.int32)
    exponent = int(torch.randint(-130, 124, (1,), generator=g))
    return (points.view(torch.float32) * 2.0**exponent).copysign(torch.randn(BLOCK, generator=g))


def ties_in_bfloat16(g: torch.Generator) -> Tensor:
    """What rounding to bfloat16 leaves a tie."""
    points = torch.tensor(MIDPOINTS)[torch.randint(len(MIDPOINTS), (BLOCK,), generator=g)]
    return points * 2.0 ** int(torch.randint(-130, 124, (1,), generator=g))


def with_infinity(g: torch.Generator) -> Tensor:
    x = normal(g)
    x[int(torch.randint(BLOCK, (1,), generator=g))] = -torch.inf
    return x


def with_nan(g: torch.Generator) -> Tensor:
    x = with_infinity(g)
    x[int(torch.randint(BLOCK, (1,), generator=g))] = torch.nan
    return x


KINDS = (normal, signed_zeros, tiny, huge, ties, ties_in_bfloat16, with_infinity, with_nan)


@st.composite
def weights(draw: st.DrawFn, kinds: tuple = KINDS) -> Tensor:
    """[n, 64] of blocks of every kind."""
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    chosen = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=4))
    return torch.stack([kind(g) for kind in chosen for _ in range(2)]).reshape(-1, 2 * BLOCK).to(draw(dtypes))


def codes(packed: Tensor) -> Tensor:
    """uint8 [blocks, 32], low nibble first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).reshape(-1, BLOCK)


def bits(x: Tensor) -> Tensor:
    return x.view(INTEGER[x.dtype])


@few
@given(weights(), rules)
def test_bytes_are_those_of_torchao(weight: Tensor, rule: Rule) -> None:
    scale, packed = to_mx(weight, torch.float4_e2m1fn_x2, BLOCK, ScaleCalculationMode[rule.upper()])
    ours, blocks = encode_mxfp4(weight, rule), weight.reshape(-1, BLOCK)
    scale, our_scale, amax = scale.view(torch.uint8).reshape(-1), ours.scale.reshape(-1), blocks.abs().amax(-1)
    # torchao's rceil rounds its logarithm: it does not see that amax / 6 is just above a power of two.
    above = torch.frexp(amax.double() / 6).mantissa - 0.5
    same_scale = (above <= 0) | (above > 2**-18) if rule == "rceil" else torch.ones_like(amax, dtype=torch.bool)
    assert torch.equal(our_scale[same_scale], scale[same_scale])
    # Byte 0 is 2^-127 to every decoder; torchao divides by 2^-126 there, with rceil by 1. Elements of NaN are any.
    same_codes = same_scale & ((our_scale > 0) | (amax == 0)) & (our_scale != 255)
    assert torch.equal(codes(ours.packed)[same_codes], codes(packed)[same_codes])


@few
@given(weights())
def test_bytes_are_those_of_compressed_tensors(weight: Tensor) -> None:
    args = QuantizationArgs.model_validate(
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
    )
    blocks = weight.reshape(-1, BLOCK)
    ours, amax = encode_mxfp4(weight), blocks.abs().amax(-1)
    # It cannot express what rounds to 2^128 (it encodes zeros at scale 2^128) nor NaN.
    fine = amax < 1.75 * 2**127
    blocks = blocks[fine]
    if not len(blocks):
        return
    scale, _ = calculate_qparams(blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True), args)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    theirs = MXFP4PackedCompressor.compress({"weight": blocks, "weight_scale": scale}, scheme)
    assert torch.equal(ours.scale.reshape(-1)[fine], theirs["weight_scale"].reshape(-1))
    our_codes = codes(ours.packed)[fine]
    # It encodes -0.0, and what is -0.0 when divided by the scale, as +0.
    our_codes = torch.where(blocks / scale == 0, our_codes & 7, our_codes)
    assert torch.equal(our_codes, codes(theirs["weight_packed"]))


@few
@given(weights(), rules)
def test_fake_quantization_is_decoding_of_the_encoded(weight: Tensor, rule: Rule) -> None:
    decoded = decode_mxfp4(encode_mxfp4(weight, rule), weight.dtype)
    assert torch.equal(bits(fake_quantize(weight, rule)), bits(decoded))


@few
@given(weights(), rules, rules)
def test_quantizing_again_changes_no_value_under_any_rule(weight: Tensor, first: Rule, second: Rule) -> None:
    once = fake_quantize(weight, first)
    if once.isinf().any():  # 2^128 of a saturated block is not a number of its type
        once = once.nan_to_num(nan=torch.nan, posinf=1.0, neginf=-1.0)
        once = fake_quantize(once, first)
    assert torch.equal(bits(fake_quantize(once, second)), bits(once))


@few
@given(weights((normal, signed_zeros, ties_in_bfloat16)), rules, st.integers(-20, 20))
def test_a_power_of_two_only_moves_the_scale(weight: Tensor, rule: Rule, power: int) -> None:
    ours = encode_mxfp4(weight, rule)
    moved = encode_mxfp4(weight * 2.0**power, rule)
    normal_range = (ours.scale > 24) & (ours.scale < 224)
    assert torch.equal(moved.scale[normal_range], (ours.scale.int() + power).to(torch.uint8)[normal_range])
    rows = normal_range.reshape(-1)
    assert torch.equal(codes(moved.packed)[rows], codes(ours.packed)[rows])


@few
@given(weights((normal, signed_zeros, tiny, ties, ties_in_bfloat16)), rules)
def test_error_is_at_most_half_a_step_unless_floor_saturates(weight: Tensor, rule: Rule) -> None:
    """In units of the scale: the largest step is 2, between 4 and 6. Under `floor` magnitudes up to 8 become 6."""
    ours = encode_mxfp4(weight, rule)
    scale = POWERS[ours.scale.reshape(-1, 1).int()]
    error = (decode_mxfp4(ours, torch.float32).double() - weight.double()).reshape(-1, BLOCK).abs() / scale
    assert error.max() <= (2 if rule == "floor" else 1)


@few
@given(weights((normal, tiny, huge, ties)), rules)
def test_scales_are_the_exact_logarithm(weight: Tensor, rule: Rule) -> None:
    """Computed by frexp in float64, which is exact."""
    for amax, byte in zip(
        weight.reshape(-1, BLOCK).abs().amax(-1).tolist(), encode_mxfp4(weight, rule).scale.reshape(-1), strict=True
    ):
        half, exponent = math.frexp(amax)  # amax = 2 half * 2^(exponent - 1)
        up = {"floor": False, "even": half >= 0.875, "rceil": half > 0.75}[rule]
        want = max(0, 127 + exponent - 1 - 2 + up) if amax and not math.isinf(amax) else 0
        assert math.isinf(amax) or byte == want, amax


def test_the_low_nibble_is_the_even_index() -> None:
    weight = torch.zeros(BLOCK)
    weight[:4] = torch.tensor([6.0, -0.5, 1.5, -4.0])
    assert encode_mxfp4(weight).packed[:2].tolist() == [0x97, 0xE3]
    assert encode_mxfp4(weight).scale.tolist() == [127]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rule", "byte"), [("floor", 253), ("even", 253), ("rceil", 254)])
def test_special_blocks(dtype: torch.dtype, rule: Rule, byte: int) -> None:
    weight = torch.ones(4, BLOCK, dtype=dtype)
    weight[0], weight[1, 3], weight[2, 3] = 0.0, -torch.inf, torch.nan
    weight[3] = torch.finfo(dtype).smallest_normal
    code = encode_mxfp4(weight, rule)
    assert code.scale[:, 0].tolist() == [0, byte, 255, 0]
    decoded = decode_mxfp4(code, dtype)
    assert decoded[0].tolist() == [0.0] * BLOCK
    assert decoded[1].tolist() == [0.0] * 3 + [-torch.inf] + [0.0] * 28
    assert decoded[2].isnan().all()
    assert torch.equal(decoded[3], weight[3])


def test_every_byte_pair_decodes_to_the_definition() -> None:
    scale = torch.arange(256, dtype=torch.uint8)[:, None]
    packed = torch.full((256, 16), 0xF0, dtype=torch.uint8)
    packed[:, :8] = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8)
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    values = torch.cat((magnitudes, -magnitudes, torch.tensor([0.0, -6.0] * 8)))
    for dtype in DTYPES:
        want = (POWERS[:, None] * values).to(dtype)
        assert torch.equal(decode_mxfp4(Mxfp4(packed, scale), dtype).nan_to_num(1.0), want.nan_to_num(1.0))


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (2, 3, 32), (32,)])
def test_any_number_of_dimensions_and_any_strides(shape: tuple[int, ...]) -> None:
    weight = torch.randn(*shape)
    code = encode_mxfp4(weight)
    assert code.packed.shape == (*shape[:-1], shape[-1] // 2)
    assert code.scale.shape == (*shape[:-1], shape[-1] // 32)
    assert decode_mxfp4(code, torch.bfloat16).shape == weight.shape
    wide = torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]
    assert torch.equal(fake_quantize(wide), fake_quantize(wide.contiguous()))


def test_the_input_stays_as_it_is() -> None:
    weight = torch.randn(2, 64)
    before = weight.clone()
    fake_quantize(weight)
    encode_mxfp4(weight)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("function", [encode_mxfp4, fake_quantize])
def test_mistakes_say_what_is_wrong(function: object) -> None:
    assert callable(function)
    with pytest.raises(ValueError, match=r"multiple of 32 elements, this tensor is \[2, 48\]"):
        function(torch.zeros(2, 48))
    with pytest.raises(ValueError, match=r"float32 or bfloat16, not torch.float16"):
        function(torch.zeros(2, 64, dtype=torch.float16))
    with pytest.raises(ValueError, match="unknown MX rule 'nearest'; choose from floor, even, rceil"):
        function(torch.zeros(2, 64), "nearest")


def test_decoding_refuses_parts_that_do_not_fit() -> None:
    packed, scale = encode_mxfp4(torch.zeros(2, 64))
    with pytest.raises(ValueError, match="cannot have scales"):
        decode_mxfp4(Mxfp4(packed, scale[:, :1]), torch.float32)
    with pytest.raises(ValueError, match="stored as uint8"):
        decode_mxfp4(Mxfp4(packed, scale.int()), torch.float32)
    with pytest.raises(ValueError, match=r"float32 or bfloat16, not torch.float16"):
        decode_mxfp4(Mxfp4(packed, scale), torch.float16)
