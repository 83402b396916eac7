"""Fixtures of the whole suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Pools


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """`ranks(n)(function, *args)` runs a function of a test module on n gloo ranks; see tests/ranks.py."""
    pools = Pools()
    yield pools
    pools.stop()
