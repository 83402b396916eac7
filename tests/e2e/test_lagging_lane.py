"""`mopd train` while a teacher is away: it goes on up to the stated lag, or ends and is taken up again, and every
trajectory that was sampled is trained on once.

One teacher is on a real teacher service, behind a proxy that can refuse; the other eight are embedded.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from small_run import Mopd, assert_nothing_left, metrics, processes_of, wait_for_step

from megatron_mopd.store import TrajectoryStore
from megatron_mopd.trajectory_file import write_trajectories
from tools.faulty_proxy import FaultyProxy

AWAY = "general-low"


class Proxy:
    """In a thread of its own; `refuse` decides about scoring requests from now on."""

    def __init__(self, target: str):
        self.refuse = False
        self._proxy = FaultyProxy(target, lambda teacher: "error" if self.refuse else None)
        self._ready, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        self._ready.wait()

    async def _serve(self) -> None:
        async with self._proxy.serve() as self.url:
            self._ready.set()
            await asyncio.to_thread(self._over.wait)

    def close(self) -> None:
        self._over.set()
        self._thread.join()


@pytest.fixture(scope="module")
def overlay(mopd: Mopd, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One teacher on the service."""
    teachers = yaml.safe_load(Path(mopd.config[-1]).read_text())["teachers"]["models"]
    models = [{**teacher, **({"backend": "megatron"} if teacher["name"] == AWAY else {})} for teacher in teachers]
    file = tmp_path_factory.mktemp("away") / "away.yaml"
    file.write_text(yaml.safe_dump({"teachers": {"models": models, "batch_tokens": 100}}))
    return file


@pytest.fixture(scope="module")
def service(mopd: Mopd, overlay: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    process = mopd.start("serve-teacher", str(overlay), f"run.folder={tmp_path_factory.mktemp('served') / 'run'}")
    assert process.stdout is not None
    line = next(line for line in process.stdout if line.startswith("teacher service at "))
    yield line.split()[3].rstrip(":,")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)


@pytest.fixture
def proxy(service: str) -> Iterator[Proxy]:
    proxy = Proxy(service)
    yield proxy
    proxy.close()


def rows(run_folder: Path) -> dict[int, list[dict]]:
    """Of each step's batch."""
    steps = sorted((run_folder / "trajectories").glob("step_*/rows.jsonl"))
    return {
        int(f.parent.name.removeprefix("step_")): [json.loads(x) for x in f.read_text().splitlines()] for f in steps
    }


def kill_driver(run_folder: Path) -> None:
    pid = next(pid for pid, words in processes_of(run_folder).items() if "megatron_mopd.driver" in words)
    os.kill(pid, signal.SIGKILL)


def finish(process: subprocess.Popen[str], timeout_s: float = 240) -> tuple[int, str]:
    _, err = process.communicate(timeout=timeout_s)
    return process.returncode, err


def test_a_run_goes_on_without_a_teacher_and_trains_on_its_trajectories_later(
    mopd: Mopd, overlay: Path, proxy: Proxy, tmp_path: Path
) -> None:
    """In between the driver is killed: what waits for the teacher is on disk."""
    run_folder, lag = tmp_path / "run", 4
    options = (f"teachers.max_lag_steps={lag}", "teachers.lag_after_s=0.3", "teachers.max_attempts=100000")
    words = (str(overlay), f"run.folder={run_folder}", f"service.urls=[{proxy.url}]", "run.num_steps=8", *options)
    process = mopd.start("train", *words)
    wait_for_step(process, run_folder, 1)
    proxy.refuse = True
    wait_for_step(process, run_folder, 3)
    kill_driver(run_folder)
    wait_for_step(process, run_folder, 4)
    proxy.refuse = False
    code, err = finish(process)
    assert code == 0, err

    waiting = [row["rollout/unscored"] for row in metrics(run_folder)]
    assert waiting[0] == 0
    assert max(waiting) > 0
    assert waiting[-1] == 0
    of_teacher = {step: [r for r in found if r["teacher"] == AWAY] for step, found in rows(run_folder).items()}
    assert any(not found for found in of_teacher.values()), "a step went without it"
    count = Counter(r["id"] for found in rows(run_folder).values() for r in found)
    assert set(count.values()) == {1}
    assert len(count) == 8 * 36
    for step, found in of_teacher.items():
        assert all(0 <= step - int(r["id"].rpartition("@")[2]) <= lag for r in found)
    assert max(row["rollout/staleness"] for row in metrics(run_folder)) > 0
    assert all(row["train/mismatch_max"] < 1e-4 for row in metrics(run_folder)), "of the same weights, without the late"
    assert f"goes on without teacher {AWAY}" in (run_folder / "driver.log").read_text()
    assert_nothing_left(run_folder)


def test_a_run_that_gives_a_teacher_up_goes_on_from_the_same_trajectories(
    mopd: Mopd, overlay: Path, proxy: Proxy, tmp_path: Path
) -> None:
    run_folder = tmp_path / "run"
    words = (str(overlay), f"run.folder={run_folder}", f"service.urls=[{proxy.url}]", "run.num_steps=5")
    often = ("run.save_every_steps=50", "teachers.max_attempts=2")
    process = mopd.start("train", *words, *often)
    wait_for_step(process, run_folder, 1)
    proxy.refuse = True
    code, err = finish(process)
    assert code == 2
    assert f"teacher {AWAY}, trajectory " in err
    assert f"{proxy.url} is down: /score answered 500 out of memory" in err
    steps = len(metrics(run_folder))
    assert (run_folder / "checkpoints" / "latest").read_text().strip() == f"step_{steps:08d}", "saved where it ended"

    store = TrajectoryStore(run_folder)
    kept = store.kept(steps)
    assert len(kept) == 36
    marked = [replace(s, trajectory=replace(s.trajectory, finish_reason="kept")) for s in kept]
    write_trajectories(store._sampled(steps), marked)

    proxy.refuse = False
    code, err = finish(mopd.start("train", *words, *often))
    assert code == 0, err
    taken_up = rows(run_folder)[steps]
    assert sorted(r["id"] for r in taken_up) == sorted(s.trajectory.id for s in kept)
    assert {r["finish_reason"] for r in taken_up} == {"kept"}, "not sampled again"
    assert len(metrics(run_folder)) == 5
