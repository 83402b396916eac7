"""Real SGLang servers for the tests of this folder, started through the keeper as a run starts them.

`student` is one server for the whole session; a test that must kill or misuse servers starts its own (`start_servers`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from running import WAIT_S, Server, Servers, StartServers
from tiny import write_checkpoint

from megatron_mopd.config import Config
from megatron_mopd.servers.launch import endpoints, servers
from megatron_mopd.yaml_tree import overlay

ROOT = Path(__file__).parents[2]
TINY_SERVER = {
    "device": "cpu",
    "dtype": "float32",
    "max_total_tokens": 8192,
    "max_running_requests": 32,
    "watchdog_timeout": 300,
}
START_S = 180.0


TEST_S = 600
"""Also of a test that waits for the first start of the servers of its module."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(TEST_S))  # a marker of the test itself counts more


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    """Interpreter of an environment with SGLang."""
    python = Path(os.environ.get("MOPD_SGLANG_PYTHON", ROOT / ".venv-sglang/bin/python"))
    if not python.exists():
        pytest.fail(f"{python} does not exist; run tools/setup_sglang_cpu.sh, or set MOPD_SGLANG_PYTHON", pytrace=False)
    return python


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three tiny models of one architecture: the student's and two teachers'. Every layer has experts, as SGLang
    takes for granted of Qwen3-MoE."""
    folders = [tmp_path_factory.mktemp("checkpoints") / name for name in ("student", "teacher-0", "teacher-1")]
    for seed, folder in enumerate(folders):
        write_checkpoint(folder, seed, mlp_only_layers=[])
    return folders


@pytest.fixture(scope="session")
def make_config(sglang_python: Path, checkpoints: list[Path]) -> Callable[..., Config]:
    """`make_config(run_folder, students=1, teachers=0, **tables)`; teachers are called t0, t1, ..."""

    def make(run_folder: Path, students: int = 1, teachers: int = 0, **tables: Any) -> Config:
        student, *others = checkpoints
        models = [
            {"name": f"t{i}", "domain": "d", "effort": f"e{i}", "checkpoint": str(others[i % len(others)])}
            for i in range(teachers)
        ]
        tree = {
            "run": {"folder": str(run_folder), "num_steps": 1},
            "student": {"checkpoint": str(student)},
            "teachers": {"backend": "sglang" if teachers else "embedded", "models": models},
            "prompts": {"files": [], "batch_size": 1, "mixture": {"d": 1.0}, "efforts": {"e0": 1.0}},
            "environments": {},
            "rollout": {"engine": "sglang" if students else "embedded", "max_response_tokens": 64},
            "sglang": {
                "python": str(sglang_python),
                "server": TINY_SERVER,
                "student": {"num_servers": students or 1},
                "start_timeout_s": START_S,
            },
        }
        return Config.model_validate(overlay(tree, tables))

    return make


@pytest.fixture(scope="session")
def start_servers(make_config: Callable[..., Config]) -> StartServers:
    """`with start_servers(tmp_path, students=2, sglang={...}) as s:` is entered once all of them are healthy."""

    @contextmanager
    def start(run_folder: Path, students: int = 1, teachers: int = 0, **tables: Any) -> Iterator[Servers]:
        config = make_config(run_folder, students, teachers, **tables)
        with servers(config):
            started = Servers(config, endpoints(run_folder))
            for name in started.urls:
                started.wait_healthy(name, timeout_s=WAIT_S)
            yield started

    return start


@pytest.fixture(scope="session")
def student(start_servers: StartServers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start_servers(tmp_path_factory.mktemp("session") / "run", rollout={"router_replay": True}) as started:
        yield Server(started.urls["student-0"], started.config.student.checkpoint, started.config)
