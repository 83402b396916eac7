"""The elementwise part of the log-prob head on a GPU: `add_exponentials` of objectives/logprob_head.py in one kernel.

As separate operations it reads and writes the logits about ten times, which takes a third of the time of the products.
The kernel reads them once and writes E.

Promises (tests/gpu/test_head_kernel.py, which needs a GPU): the same sums and the same E as `add_exponentials`.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]  (comes with torch for a GPU)
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from megatron_mopd.objectives.logprob_head import LIMIT

_WIDTH = 2048
"""Columns that a program has in registers."""


def add_exponentials(
    logits_cb: Tensor,
    reference_c: Tensor,
    column_c: Tensor,
    temperature: float,
    sums_3c: Tensor,
    e_cb: Tensor | None = None,
) -> None:
    """See objectives/logprob_head.py. The logits are left as they are."""
    c, b = logits_cb.shape
    assert logits_cb.stride(1) == 1
    assert sums_3c.stride(1) == 1
    assert e_cb is None or e_cb.stride(1) == 1
    out = logits_cb if e_cb is None else e_cb
    if c and b:
        _add_exponentials[(c,)](  # pyright: ignore[reportIndexIssue]  (jit makes a launcher of it)
            *(logits_cb, reference_c, column_c, sums_3c, out),
            *(b, logits_cb.stride(0), sums_3c.stride(0), out.stride(0), temperature, 1.0 / temperature),
            limit=LIMIT,
            stores=e_cb is not None,
            width=_WIDTH,
            num_warps=8,
        )


@triton.jit
def _add_exponentials(
    logits,
    reference,
    column,
    sums,
    e,
    b,
    logits_stride,
    sums_stride,
    e_stride,
    temperature,
    inverse,
    limit: tl.constexpr,
    stores: tl.constexpr,
    width: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # rows times columns may not fit 32 bits
    of_row, of_target = tl.load(reference + row), tl.load(column + row)
    s = tl.zeros([width], tl.float32)
    u = tl.zeros([width], tl.float32)
    q = tl.zeros([width], tl.float32)
    for start in range(0, b, width):
        at = start + tl.arange(0, width)
        exists = at < b
        z = tl.load(logits + row * logits_stride + at, mask=exists, other=0.0)
        about = z * inverse
        ratio = about + (z - about * temperature) * inverse  # the compiler's own division is not rounded correctly
        # A logit that is not a number must not become one.
        difference = tl.minimum(ratio - of_row, limit, propagate_nan=tl.PropagateNan.ALL)
        x = tl.where(exists & (at != of_target), tl.exp(difference), 0.0)
        s += x
        u += x * difference
        q += x * x
        if stores:
            tl.store(e + row * e_stride + at, x.to(e.dtype.element_ty), mask=exists)
    tl.store(sums + row, tl.load(sums + row) + tl.sum(s))
    tl.store(sums + sums_stride + row, tl.load(sums + sums_stride + row) + tl.sum(u))
    tl.store(sums + 2 * sums_stride + row, tl.load(sums + 2 * sums_stride + row) + tl.sum(q))
