"""The contract of the teacher scorers (tests/contract/test_scorer.py), on a real SGLang server.

Engine and scorer share the one server here; each loads what it needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from contract.test_scorer import *  # noqa: F403
from running import Server

from megatron_mopd.client import Client
from megatron_mopd.sglang.engine import SGLangEngine
from megatron_mopd.sglang.teacher_server import TeacherPlace, TeacherServer
from megatron_mopd.sglang.weights import load_folder

pytestmark = pytest.mark.sglang


@pytest.fixture
def checkpoint(student: Server) -> Path:
    return student.checkpoint


@pytest.fixture
def update(checkpoints: list[Path]) -> Path:
    return checkpoints[1]


@pytest.fixture
def make_engine(student: Server) -> Callable[..., SGLangEngine]:
    return lambda **options: SGLangEngine(
        [student.url], student.checkpoint, student.config.sglang, run="contract", **options
    )


@pytest.fixture
def make_scorer(student: Server) -> Iterator[Callable[..., TeacherServer]]:
    def make(teachers: Mapping[str, Path], **options: Any) -> TeacherServer:
        return TeacherServer(TeacherPlace(student.url, teachers, may_load=True), 60.0, **options)

    asyncio.run(load_checkpoint(student))
    yield make
    asyncio.run(load_checkpoint(student))


async def load_checkpoint(server: Server) -> None:
    """Under a name that no scorer takes for its first teacher's."""
    async with Client(60) as client:
        await load_folder(client, server.url, server.checkpoint, "contract")
