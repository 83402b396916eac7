"""A weight that the forward pass sees as it will be served, and backward as it is.

Straight-through: the gradient of the quantized weight is the gradient of the weight, without clipping; the gradient of
what it was multiplied with is of the quantized weight (Bengio et al. 2013, arXiv:1308.3432). Rounding is to nearest, as
in formats.py: stochastic rounding would part training from what is served.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def straight_through(weight: Tensor, quantized: Tensor) -> Tensor:
    """The values of `quantized`; its gradient goes to `weight`."""
    result = _StraightThrough.apply(weight, quantized)
    assert isinstance(result, Tensor)
    return result


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, quantized: Tensor) -> Tensor:
        assert weight.shape == quantized.shape
        assert weight.dtype == quantized.dtype
        return quantized.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
