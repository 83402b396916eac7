"""The whole loop on SGLang servers, and the loss of the student's in the middle; of teachers: test_scoring.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from small_run import Mopd, assert_nothing_left, metrics, wait_for_step

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

SERVERS_S = 300


@pytest.fixture
def start(mopd: Mopd) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`mopd train`, stopped at the end of the test whatever happens."""
    started: list[subprocess.Popen[str]] = []

    def train(*overrides: str) -> subprocess.Popen[str]:
        started.append(mopd.start("train", *overrides))
        return started[-1]

    yield train
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)


@pytest.fixture
def on_servers(sglang_python: Path) -> list[str]:
    """Student and teachers on one server each: nine teachers, of one checkpoint here, take turns."""
    return [
        "rollout.engine=sglang",
        "teachers.backend=sglang",
        f"sglang.python={sglang_python}",
        "sglang.teachers.num_servers=1",
        "sglang.server.max_total_tokens=16384",
        "sglang.server.max_running_requests=64",
        "sglang.weight_transport=distributed",
        "sglang.check_weights=true",
        "rollout.router_replay=true",
    ]


def kill(run_folder: Path, name: str) -> None:
    """End a server as the kernel would for want of memory."""
    pid = json.loads((run_folder / "endpoints" / f"{name}.json").read_text())["pid"]
    os.killpg(pid, signal.SIGKILL)


def wait_until_sampling(run_folder: Path) -> None:
    """The next batch is on its way: the student's server has work."""
    log = run_folder / "logs" / "sglang-student-0.log"
    seen = log.read_text().count("POST /generate")
    deadline = time.monotonic() + 60
    while log.read_text().count("POST /generate") < seen + 5:
        assert time.monotonic() < deadline, "no request within 60 s"
        time.sleep(0.01)


def test_a_dead_server_comes_back_and_nothing_is_lost(
    start: Callable[..., subprocess.Popen[str]], on_servers: list[str], tmp_path: Path
) -> None:
    """The trainer is TP2 x EP2 and broadcasts its weights. The new server gets those of now from a folder that is made
    for it, and the next ones by broadcast again."""
    run_folder = tmp_path / "run"
    process = start(f"run.folder={run_folder}", *on_servers)
    wait_for_step(process, run_folder, 1, SERVERS_S)
    wait_until_sampling(run_folder)
    kill(run_folder, "student-0")
    _, err = process.communicate(timeout=SERVERS_S)
    assert process.returncode == 0, err
    rows = metrics(run_folder)
    assert len(rows) == 4
    for step, row in enumerate(rows):
        assert row["train/mismatch_max"] < 1e-4, "what was sampled before and after is of the same weights"
        assert row["train/route_agreement"] > 0.99
        assert row["train/reverse_kl"] > 0
        assert row["rollout/staleness"] == 0
        graded = (run_folder / "trajectories" / f"step_{step:08d}" / "rows.jsonl").read_text().splitlines()
        assert len({json.loads(line)["id"] for line in graded}) == 36
    assert_nothing_left(run_folder)
