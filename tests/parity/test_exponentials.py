"""The compiled elementwise part of the log-prob head gives what the plain operations give."""

from __future__ import annotations

import shutil

import pytest
import torch

from megatron_mopd.mcore import exponentials
from megatron_mopd.objectives import logprob_head


def test_it_is_compiled_where_there_is_a_compiler() -> None:
    assert exponentials.compiled() is not None or shutil.which("cc") is None, "pip install -e . again"


@pytest.mark.skipif(exponentials.compiled() is None, reason="no C compiler was there when the package was installed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, None])
@pytest.mark.parametrize(("c", "b"), [(0, 5), (1, 1), (7, 512), (33, 1300)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_it_gives_what_the_operations_give(dtype: torch.dtype | None, c: int, b: int, temperature: float) -> None:
    """Also with targets on other ranks, rows that are cut off, logits that are no numbers, and strides."""
    g = torch.Generator().manual_seed(0)
    logits_cb = (torch.randn(c, b + 3, generator=g) * 20)[:, :b]
    reference_c = torch.randn(c, generator=g) * 20
    column_c = torch.randint(-b, 2 * b, (c,), generator=g)
    if c > 1:
        logits_cb[-1, -1] = torch.nan
        column_c[0] = b - 1
    found = []
    for module in (logprob_head, exponentials):
        sums_3c = torch.ones(3, c)
        e_cb = None if dtype is None else torch.full((c, b + 2), -1.0, dtype=dtype)
        e = None if e_cb is None else e_cb[:, :b]
        module.add_exponentials(logits_cb.clone(), reference_c, column_c, temperature, sums_3c, e)
        found.append((sums_3c, torch.zeros(0) if e_cb is None else e_cb.float()))
    (want_sums, want_e), (sums, e) = found
    torch.testing.assert_close(sums, want_sums, rtol=1e-5, atol=0, equal_nan=True)
    torch.testing.assert_close(e, want_e, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-38, equal_nan=True)


@pytest.mark.skipif(exponentials.compiled() is None, reason="no C compiler was there when the package was installed")
def test_exponentials_are_right_to_a_few_roundings() -> None:
    difference = torch.linspace(-100, logprob_head.LIMIT, 100_001)
    e = torch.empty_like(difference)[None]
    nowhere = torch.full((1,), -1)
    exponentials.add_exponentials(difference[None], torch.zeros(1), nowhere, 1.0, torch.zeros(3, 1), e)
    want = difference.double().exp()
    normal = want > torch.finfo(torch.float32).tiny
    assert ((e[0].double() - want) / want)[normal].abs().max() < 3e-7
    assert (e[0].double() - want)[~normal].abs().max() < 2e-45
