"""The elementwise part of the log-prob head, `add_exponentials` of objectives/logprob_head.py, in one kernel where one
is at hand: exponentials_gpu.py on a GPU, exponentials.c on a CPU if there was a C compiler when this package was
installed.

Promises (tests/parity/test_exponentials.py, tests/gpu/test_head_kernel.py): the same sums and the same E, but for
rounding, whichever it is.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from megatron_mopd.objectives import logprob_head


def add_exponentials(
    logits_cb: Tensor,
    reference_c: Tensor,
    column_c: Tensor,
    temperature: float,
    sums_3c: Tensor,
    e_cb: Tensor | None = None,
) -> None:
    """See objectives/logprob_head.py."""
    arguments = logits_cb, reference_c, column_c, temperature, sums_3c, e_cb
    if logits_cb.is_cuda:
        from megatron_mopd.mcore import exponentials_gpu  # its compiler comes with torch for a GPU only

        exponentials_gpu.add_exponentials(*arguments)
    elif (kernel := compiled()) is not None and (e_cb is None or e_cb.dtype in _BYTES):
        _call(kernel, *arguments)
    else:
        logprob_head.add_exponentials(*arguments)


_BYTES = {torch.bfloat16: 2, torch.float32: 4}


@cache
def compiled() -> Any | None:
    """exponentials.c; None where it was not compiled."""
    spec = find_spec("megatron_mopd.mcore._exponentials")
    if spec is None or spec.origin is None:
        return None
    kernel = ctypes.CDLL(spec.origin).add_exponentials
    i, f, p = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
    kernel.argtypes, kernel.restype = (p, i, i, i, p, p, f, f, p, i, p, i, ctypes.c_int), None
    return kernel


def _call(
    kernel: Any,
    logits_cb: Tensor,
    reference_c: Tensor,
    column_c: Tensor,
    temperature: float,
    sums_3c: Tensor,
    e_cb: Tensor | None,
) -> None:
    (c, b), bytes_of_e = logits_cb.shape, 0 if e_cb is None else _BYTES[e_cb.dtype]
    reference_c, column_c = reference_c.contiguous(), column_c.contiguous()
    assert logits_cb.dtype == reference_c.dtype == sums_3c.dtype == torch.float32
    assert column_c.dtype == torch.int64
    assert len(reference_c) == len(column_c) == c
    assert b <= 1 or logits_cb.stride(1) == 1
    assert e_cb is None or (e_cb.shape == (c, b) and (b <= 1 or e_cb.stride(1) == 1))
    assert sums_3c.shape == (3, c)
    assert c <= 1 or sums_3c.stride(1) == 1
    kernel(
        *(logits_cb.data_ptr(), logits_cb.stride(0), c, b),
        *(reference_c.data_ptr(), column_c.data_ptr(), temperature, logprob_head.LIMIT),
        *(sums_3c.data_ptr(), sums_3c.stride(0)),
        *((None, 0) if e_cb is None else (e_cb.data_ptr(), e_cb.stride(0))),
        bytes_of_e,
    )
