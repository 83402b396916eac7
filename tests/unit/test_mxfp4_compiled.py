"""The compiled MXFP4 gives the bits that the plain operations give."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor

from megatron_mopd.quantization import formats, mxfp4_compiled
from megatron_mopd.quantization.formats import BLOCK, DTYPES, Rule

RULES: tuple[Rule, ...] = ("floor", "even", "rceil")


def test_it_is_compiled_where_there_is_a_compiler() -> None:
    assert mxfp4_compiled.compiled() is not None or shutil.which("cc") is None, "pip install -e . again"


def any_bits(dtype: torch.dtype) -> Tensor:
    """Numbers of one exponent and its neighbours per block, of every exponent; one in a thousand of any bits."""
    g = torch.Generator().manual_seed(0)
    n = 64 * 256
    exponent = (torch.arange(256).repeat(64)[:, None] + torch.randint(-4, 1, (n, BLOCK), generator=g)).clamp(0, 255)
    mantissa = torch.randint(1 << 23, (n, BLOCK), generator=g)
    mantissa[::2] &= 0x700000  # ties
    bits = exponent << 23 | mantissa | torch.randint(0, 2, (n, BLOCK), generator=g) << 31
    wild = torch.rand(n, BLOCK, generator=g) < 1e-3
    bits = torch.where(wild, torch.randint(1 << 32, (n, BLOCK), generator=g), bits)
    return (bits - (bits >> 31 << 32)).int().view(torch.float32).to(dtype).reshape(-1, 4 * BLOCK)


@pytest.mark.skipif(mxfp4_compiled.compiled() is None, reason="no C compiler was there when the package was installed")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES)
def test_it_gives_the_same_bits(dtype: torch.dtype, rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = any_bits(dtype)
    assert mxfp4_compiled.applies_to(weight)
    fast, code = formats.fake_quantize(weight, rule), formats.encode_mxfp4(weight, rule)
    monkeypatch.setattr(mxfp4_compiled, "compiled", lambda: None)
    plain, plain_code = formats.fake_quantize(weight, rule), formats.encode_mxfp4(weight, rule)
    assert torch.equal(fast.view(torch.uint8), plain.view(torch.uint8))
    assert torch.equal(code.packed, plain_code.packed)
    assert torch.equal(code.scale, plain_code.scale)
    assert len(code.scale.unique()) > 250


@pytest.mark.skipif(mxfp4_compiled.compiled() is None, reason="no C compiler was there when the package was installed")
def test_it_takes_strides_and_gradients() -> None:
    weight = torch.randn(64, 64).t().requires_grad_()
    assert torch.equal(formats.fake_quantize(weight), formats.fake_quantize(weight.detach().clone().contiguous()))
    assert not formats.fake_quantize(weight).requires_grad
    assert formats.encode_mxfp4(torch.zeros(0, 32)).packed.shape == (0, 16)
