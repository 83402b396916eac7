"""A tiny random Qwen3-MoE in two versions, and the backends that the contracts are checked on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import write_checkpoint

from megatron_mopd.embedded.engine import EmbeddedEngine
from megatron_mopd.embedded.scorer import EmbeddedScorer
from megatron_mopd.protocols import RolloutEngine, TeacherScorer

MakeEngine = Callable[..., RolloutEngine]
MakeScorer = Callable[..., TeacherScorer]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _checkpoint(tmp_path_factory, seed=0)


@pytest.fixture(scope="session")
def checkpoint(student: Path) -> Path:
    """What an engine serves before its first update."""
    return student


@pytest.fixture(scope="session")
def update(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights of the same architecture."""
    return _checkpoint(tmp_path_factory, seed=1)


def _checkpoint(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    folder = tmp_path_factory.mktemp(f"weights{seed}")
    write_checkpoint(folder, seed=seed)
    return folder


@pytest.fixture(params=["embedded"])
def make_engine(request: pytest.FixtureRequest, student: Path) -> MakeEngine:
    """`make_engine(temperature=.., top_p=.., ...)` serves the student's weights."""
    return {"embedded": lambda **options: EmbeddedEngine(student, **{"seed": 0, **options})}[request.param]


@pytest.fixture(params=["embedded"])
def make_scorer(request: pytest.FixtureRequest) -> MakeScorer:
    """`make_scorer({name: folder}, temperature=..)`."""
    return {"embedded": EmbeddedScorer}[request.param]
