"""The log-prob head on a GPU: the checks of tests/head_checks.py, which a CPU passes too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from head_checks import CHECKS


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_head_passes(check: Callable[[str], None], device: str) -> None:
    check(device)
