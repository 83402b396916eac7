"""Products of bfloat16 factors have the sums of exact products, in float32."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_mopd.mcore import products

SIZES = st.integers(0, 40)


@pytest.fixture(params=["mkl", "widened"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "widened":
        monkeypatch.setattr(products, "_mkl_gemm", lambda: None)
    elif products._mkl_gemm() is None:
        pytest.skip("this torch was built without MKL")
    return request.param


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@given(m=SIZES, k=SIZES, n=SIZES, turned=st.tuples(*[st.booleans()] * 2), seed=st.integers(0, 9))
def test_any_shape_and_stride(dtype: torch.dtype, m: int, k: int, n: int, turned: tuple[bool, bool], seed: int) -> None:
    """Also of parts of larger matrices, whose rows are not next to one another."""
    g = torch.Generator().manual_seed(seed)

    def part(rows: int, columns: int, is_turned: bool) -> torch.Tensor:
        if is_turned:
            return part(columns, rows, False).t()
        return torch.randn(rows + 2, columns + 3, generator=g).to(dtype)[1 : 1 + rows, 2 : 2 + columns]

    a_MK, b_KN = part(m, k, turned[0]), part(k, n, turned[1])
    want = a_MK.double() @ b_KN.double()
    out_MN = torch.full((m, n + 1), torch.nan)[:, :n]
    products.product(a_MK, b_KN, out_MN)
    torch.testing.assert_close(out_MN.double(), want, rtol=0, atol=1e-5)
    products.add_product(a_MK, b_KN, out_MN)
    torch.testing.assert_close(out_MN.double(), 2 * want, rtol=0, atol=2e-5)


def test_not_a_number_stays_one() -> None:
    a_MK, b_KN = torch.ones(3, 4).bfloat16(), torch.ones(4, 5).bfloat16()
    a_MK[1, 2], out_MN = torch.nan, torch.zeros(3, 5)
    products.add_product(a_MK, b_KN, out_MN)
    assert out_MN.isnan().any(1).tolist() == [False, True, False]
