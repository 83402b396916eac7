"""On a GPU the elementwise part of the log-prob head is one kernel: it gives what the plain operations give."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("c", "b"), [(1, 1), (7, 2048), (33, 5001)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_kernel_gives_what_the_operations_give(dtype: torch.dtype, c: int, b: int, temperature: float) -> None:
    """Also with targets on other ranks, rows that are cut off, and logits that are no numbers."""
    from megatron_mopd.mcore import exponentials_gpu
    from megatron_mopd.objectives import logprob_head

    g = torch.Generator("cuda").manual_seed(0)
    logits_cb = torch.randn(c, b, generator=g, device="cuda") * 20
    logits_cb[-1, -1] = torch.nan
    reference_c = torch.randn(c, generator=g, device="cuda") * 20
    column_c = torch.randint(-b, 2 * b, (c,), generator=g, device="cuda")
    found = []
    for module in (logprob_head, exponentials_gpu):
        sums_3c, e_cb = torch.ones(3, c, device="cuda"), torch.empty(c, b, dtype=dtype, device="cuda")
        module.add_exponentials(logits_cb.clone(), reference_c, column_c, temperature, sums_3c, e_cb)
        found.append((sums_3c, e_cb.float()))
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-2 if want.shape == (c, b) else 1e-5, atol=0, equal_nan=True)
