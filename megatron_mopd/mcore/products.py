"""Matrix products whose sums and results are float32, from factors of the model's own dtype.

Rounding logits to bfloat16 would cost more than a reward is large, and rounding what a chunk adds to a gradient of the
weights is lost at every chunk. On a GPU the tensor cores do it. On a CPU torch has no such product, but the MKL within
it has: cblas_gemm_bf16bf16f32, as fast as torch's product that rounds its results. A torch without MKL widens the
factors, which is slower and takes memory for them.

Promises (tests/parity/test_products.py): the result of exact products summed in float32, for any strides of the factors
of which one is 1; nothing is allocated with MKL.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_ROW_MAJOR, _NO_TRANS, _TRANS = 101, 111, 112
"""Of CBLAS."""


def product(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor) -> None:
    """Float32 out = a @ b."""
    if a_MK.dtype == torch.float32:
        torch.mm(a_MK, b_KN, out=out_MN)
    elif a_MK.is_cuda:
        torch.mm(a_MK, b_KN, out_dtype=torch.float32, out=out_MN)
    elif (gemm := _mkl_gemm()) is not None:
        _call(gemm, a_MK, b_KN, 0.0, out_MN)
    else:
        torch.mm(a_MK.float(), b_KN.float(), out=out_MN)


def add_product(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor) -> None:
    """Float32 out += a @ b."""
    if a_MK.dtype == torch.float32:
        out_MN.addmm_(a_MK, b_KN)
    elif a_MK.is_cuda:
        torch.addmm(out_MN, a_MK, b_KN, out_dtype=torch.float32, out=out_MN)
    elif (gemm := _mkl_gemm()) is not None:
        _call(gemm, a_MK, b_KN, 1.0, out_MN)
    else:
        out_MN.addmm_(a_MK.float(), b_KN.float())


@cache
def _mkl_gemm() -> Any | None:
    """void cblas_gemm_bf16bf16f32(layout, transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc), of oneMKL's
    reference for C; None in a torch that was built without MKL."""
    if not torch.backends.mkl.is_available():
        return None
    gemm = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).cblas_gemm_bf16bf16f32
    i, f, p = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
    gemm.argtypes, gemm.restype = (i, i, i, i, i, i, f, p, i, p, i, f, p, i), None
    return gemm


def _call(gemm: Any, a_MK: Tensor, b_KN: Tensor, beta: float, out_MN: Tensor) -> None:
    (m, k), n = a_MK.shape, b_KN.shape[1]
    assert a_MK.dtype == b_KN.dtype == torch.bfloat16
    assert out_MN.dtype == torch.float32
    assert b_KN.shape[0] == k
    assert out_MN.shape == (m, n)
    assert out_MN.stride(1) == 1 or n <= 1
    if m == 0 or n == 0:
        return
    (a_trans, a_stride), (b_trans, b_stride) = _storage(a_MK), _storage(b_KN)
    a, b, out = (x.data_ptr() for x in (a_MK, b_KN, out_MN))
    gemm(
        *(_ROW_MAJOR, a_trans, b_trans, m, n, k),
        *(1.0, a, a_stride, b, b_stride, beta, out, max(out_MN.stride(0), n)),
    )


def _storage(x: Tensor) -> tuple[int, int]:
    """How CBLAS calls it: by rows, or as the transpose of a matrix by rows; and the distance of two rows."""
    rows, columns = x.shape
    if x.stride(1) == 1 and (rows == 1 or x.stride(0) >= columns):
        return _NO_TRANS, max(x.stride(0), columns)
    assert x.stride(0) == 1, "one stride of a factor is 1"
    return _TRANS, max(x.stride(1), rows)
