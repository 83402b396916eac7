"""The contract of the rollout engines (tests/contract/test_engine.py), on a real SGLang server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from contract.test_engine import *  # noqa: F403
from running import Server

from megatron_mopd.sglang.engine import SGLangEngine

pytestmark = pytest.mark.sglang


@pytest.fixture
def checkpoint(student: Server) -> Path:
    return student.checkpoint


@pytest.fixture
def update(checkpoints: list[Path]) -> Path:
    return checkpoints[1]


@pytest.fixture
def make_engine(student: Server) -> Callable[..., SGLangEngine]:
    def make(**options: Any) -> SGLangEngine:
        return SGLangEngine([student.url], student.checkpoint, student.config.sglang, run="contract", **options)

    return make
