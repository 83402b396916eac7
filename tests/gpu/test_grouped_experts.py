"""A grouped layer of Transformer Engine multiplies with quantized weights, and their gradient reaches `main_grad`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("fused", [False, True], ids=["autograd", "main_grad"])
def test_a_grouped_layer_is_quantized(fused: bool) -> None:
    te: Any = pytest.importorskip("transformer_engine.pytorch")
    from megatron_mopd.config import Quantization
    from megatron_mopd.mcore.quantized_experts import QuantizedExperts
    from megatron_mopd.quantization.formats import fake_quantize

    torch.manual_seed(0)
    layer = te.GroupedLinear(2, 64, 96, bias=False, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=fused).cuda()
    x_TD = torch.randn(8, 64, device="cuda", dtype=torch.bfloat16)
    experts = QuantizedExperts([], Quantization(experts="none"))
    experts._install(layer)
    weights = [layer.weight0, layer.weight1]
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        weight.grad_added_to_main_grad = False
    out = layer(x_TD, [3, 5])
    parts = [x_TD[:3], x_TD[3:]]
    want = torch.cat([x @ fake_quantize(w).t() for x, w in zip(parts, weights, strict=True)])
    torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)
    out.sum().backward()
    for x, weight in zip(parts, weights, strict=True):
        gradient = weight.main_grad if fused else weight.grad
        assert gradient is not None
        torch.testing.assert_close(gradient.float(), x.float().sum(0).expand(96, 64), rtol=2e-2, atol=2e-2)
