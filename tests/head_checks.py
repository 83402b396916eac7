"""Checks of the log-prob head on a device, with torch alone.

    python tests/head_checks.py [cuda|cpu]      each by name; exit code 1 where one fails

tests/gpu/test_head_kernel.py runs the same under pytest.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable

import torch
from head_cases import Case, assert_near, error, of_rank, reference

from megatron_mopd.mcore import exponentials, products
from megatron_mopd.objectives import logprob_head

DTYPES = {torch.float32: 3e-6, torch.bfloat16: 2e-3}
"""Relative errors of a gradient."""


def check_products_have_float32_sums(device: str) -> None:
    """Of exact products; parts of larger matrices, and transposed ones."""
    g = torch.Generator(device).manual_seed(0)
    for dtype in DTYPES:
        for m, k, n in ((1, 1, 1), (64, 96, 160), (200, 8, 1000)):
            a_MK = torch.randn(m + 2, k + 8, generator=g, device=device).to(dtype)[:m, :k]
            b_KN = torch.randn(n, k, generator=g, device=device).to(dtype).t()
            want, out_MN = a_MK.double() @ b_KN.double(), torch.empty(m, n, device=device)
            products.product(a_MK, b_KN, out_MN)
            assert error(out_MN, want) < 2e-6, (dtype, m, k, n)
            products.add_product(a_MK, b_KN, out_MN)
            assert error(out_MN, 2 * want) < 2e-6, (dtype, m, k, n)


def check_one_kernel_gives_what_the_operations_give(device: str) -> None:
    """Also with targets on other ranks, rows that are cut off, and logits that are no numbers."""
    g = torch.Generator(device).manual_seed(0)
    for dtype in (*DTYPES, None):
        for c, b in ((1, 1), (7, 2048), (33, 5001)):
            for temperature in (1.0, 0.7):
                logits_cb = torch.randn(c, b, generator=g, device=device) * 20
                reference_c = torch.randn(c, generator=g, device=device) * 20
                column_c = torch.randint(-b, 2 * b, (c,), generator=g, device=device)
                logits_cb[-1, -1], column_c[-1] = torch.nan, -1
                found = []
                for module in (logprob_head, exponentials):
                    sums_3c = torch.ones(3, c, device=device)
                    e_cb = None if dtype is None else torch.empty(c, b, dtype=dtype, device=device)
                    module.add_exponentials(logits_cb.clone(), reference_c, column_c, temperature, sums_3c, e_cb)
                    found.append((sums_3c, sums_3c if e_cb is None else e_cb.float()))
                (want_sums, want_e), (sums, e) = found
                torch.testing.assert_close(sums, want_sums, rtol=1e-5, atol=0, equal_nan=True)
                of_e = 1e-2 if dtype == torch.bfloat16 else 3e-5
                torch.testing.assert_close(e, want_e, rtol=of_e, atol=1e-38, equal_nan=True)


def check_value_and_gradient_are_those_of_float64(device: str) -> None:
    for dtype, of_gradient in DTYPES.items():
        for largest in (0.0, 40.0, -90.0):
            case = Case(num_tokens=65, vocab_size=1003, width=64, dtype=dtype, largest=largest, device=device)
            for chunk, block in ((1000, 2000), (16, 128)):
                assert_near(of_rank(case, chunk, block), reference(case), of_gradient)


def check_log_probs_from_0_to_minus_300(device: str) -> None:
    for dtype, of_gradient in DTYPES.items():
        for largest in (-300.0, 60.0):
            case = Case(num_tokens=64, dtype=dtype, temperature=1.0, largest=largest, device=device)
            got, want = of_rank(case, chunk=16), reference(case)
            assert all(torch.isfinite(x).all() for x in got)
            assert_near(got, want, of_gradient)


CHECKS: tuple[Callable[[str], None], ...] = (
    check_products_have_float32_sums,
    check_one_kernel_gives_what_the_operations_give,
    check_value_and_gradient_are_those_of_float64,
    check_log_probs_from_0_to_minus_300,
)

if __name__ == "__main__":
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    num_failed = 0
    for check in CHECKS:
        start, outcome = time.perf_counter(), "ok"
        try:
            check(device)
        except AssertionError:
            traceback.print_exc()
            num_failed, outcome = num_failed + 1, "FAILED"
        print(f"{check.__name__} on {device}: {outcome}, {time.perf_counter() - start:.1f} s", flush=True)
    sys.exit(num_failed > 0)
