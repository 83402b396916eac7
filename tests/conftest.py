"""Fixtures of the whole suite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from ranks import Pools
from small_run import Mopd, write_overlay, write_worlds

settings.register_profile("shared_cores", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared_cores")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """`ranks(n)(function, *args)` runs a function of a test module on n gloo ranks; see tests/ranks.py."""
    pools = Pools()
    yield pools
    pools.stop()


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    write_worlds(folder)
    return folder


@pytest.fixture(scope="session")
def mopd(world: Path) -> Mopd:
    """`mopd` on the small run; see tests/small_run.py."""
    return Mopd(write_overlay(world))
