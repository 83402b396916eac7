"""Matrix products whose sums and results are float32, from factors of the model's own dtype.

Rounding logits to bfloat16 would cost more than a reward is large, and rounding what a chunk adds to a gradient of the
weights is lost at every chunk. On a GPU the tensor cores do it. A CPU has no such product in torch: there bfloat16
factors are widened first, and multiplied as float32 whose factors the processor may round to bfloat16, which leaves
them as they are.

Widening wants memory: whoever calls with large bfloat16 factors on a CPU calls for a block of them at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def products_of(dtype: torch.dtype) -> Iterator[None]:
    """Within, the products below are exact for factors of that dtype, and fast. (A setting of the whole process.)"""
    setting = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    before, setting.fp32_precision = setting.fp32_precision, "bf16" if dtype == torch.bfloat16 else "ieee"
    try:
        yield
    finally:
        setting.fp32_precision = before


def factor(x: Tensor) -> Tensor:
    """In the dtype in which the products below take it. For one that is used again and again."""
    return x if x.is_cuda else x.float()


def product(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor) -> None:
    """Float32 out = a @ b."""
    if a_MK.is_cuda and a_MK.dtype != torch.float32:
        torch.mm(a_MK, b_KN, out_dtype=torch.float32, out=out_MN)
    else:
        torch.mm(factor(a_MK), factor(b_KN), out=out_MN)


def add_product(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor) -> None:
    """Float32 out += a @ b."""
    if a_MK.is_cuda and a_MK.dtype != torch.float32:
        torch.addmm(out_MN, a_MK, b_KN, out_dtype=torch.float32, out=out_MN)
    else:
        out_MN.addmm_(factor(a_MK), factor(b_KN))
