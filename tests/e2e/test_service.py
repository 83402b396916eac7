"""The teacher service as a user starts it, and as the keeper of a run does: two teachers on two ranks, TP2 x EP2."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from scoring import TEACHERS, config_of, rows
from small_run import ROOT, assert_nothing_left, processes_of
from tiny import LAYOUTS, write_checkpoint

from megatron_mopd.config import Config
from megatron_mopd.embedded.scorer import EmbeddedScorer
from megatron_mopd.errors import UserError
from megatron_mopd.protocols import EndpointDown, ScoreRequest
from megatron_mopd.servers import files
from megatron_mopd.servers.launch import servers
from megatron_mopd.service.client import ServiceClient, teacher_endpoints

START_S = 120.0
END_S = 30.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("service")
    for seed, name in enumerate(TEACHERS):
        write_checkpoint(root / name, seed)
    return root


@pytest.fixture
def config(folder: Path, tmp_path: Path) -> Config:
    processes, megatron = LAYOUTS["TP2xEP2"]
    run = {"folder": str(tmp_path / "run"), "num_steps": 1}
    return config_of(folder, run=run, service={"num_processes": processes, "megatron": megatron})


def requests() -> list[ScoreRequest]:
    prompts, responses = rows(60)
    pairs = zip(prompts, responses, strict=True)
    return [ScoreRequest(f"t{i}", tuple(p.tolist()), tuple(r.tolist())) for i, (p, r) in enumerate(pairs)]


async def ask(client: ServiceClient, within_s: float = START_S) -> list[list[np.ndarray]]:
    """The scores of both teachers, once the service takes work."""
    async with asyncio.timeout(within_s):
        for teacher in TEACHERS:
            while True:
                try:
                    await client.prepare(teacher)
                    break
                except EndpointDown:
                    await asyncio.sleep(0.1)
        return await asyncio.gather(*(client.score(teacher, requests()) for teacher in TEACHERS))


def ask_once(client: ServiceClient) -> list[list[np.ndarray]]:
    async def body() -> list[list[np.ndarray]]:
        try:
            return await ask(client)
        finally:
            await client.close()

    return asyncio.run(body())


@pytest.fixture(scope="module")
def reference(folder: Path) -> list[list[np.ndarray]]:
    async def body() -> list[list[np.ndarray]]:
        scorer = EmbeddedScorer({name: folder / name for name in TEACHERS})
        try:
            return [await scorer.score(name, requests()) for name in TEACHERS]
        finally:
            await scorer.close()

    torch.set_num_threads(1)
    return asyncio.run(body())


def assert_same(got: list[list[np.ndarray]], reference: list[list[np.ndarray]]) -> None:
    for ours, theirs in zip(got, reference, strict=True):
        np.testing.assert_allclose(np.concatenate(ours), np.concatenate(theirs), atol=1e-5)


class ServeTeacher:
    """`mopd serve-teacher`, on the terminal of a user."""

    def __init__(self, config: Config, folder: Path):
        self.file = folder / "config.yaml"
        self.file.write_text(config.dump())
        words = [sys.executable, "-m", "megatron_mopd.cli", "serve-teacher", str(self.file)]
        self.log = folder / "log"
        with self.log.open("wb") as log:
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(words, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)

    def url(self) -> str:
        """As it is printed."""
        deadline = time.monotonic() + START_S
        while not (found := re.search(r"^teacher service at (http://\S+): a, b$", self.log.read_text(), re.MULTILINE)):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        return found[1]


@pytest.fixture
def serve_teacher(config: Config, tmp_path: Path) -> Iterator[ServeTeacher]:
    started = ServeTeacher(config, tmp_path)
    yield started
    started.process.kill()
    started.process.wait()
    assert_nothing_left(tmp_path)


def test_it_scores_as_transformers_does_and_ends_in_order(
    config: Config, serve_teacher: ServeTeacher, reference: list[list[np.ndarray]]
) -> None:
    url = serve_teacher.url()

    async def body() -> None:
        client = ServiceClient(url, config)
        try:
            assert_same(await ask(client), reference)
            assert_same_in_json(url, reference[0])
            last = [asyncio.create_task(client.score("a", requests()[i : i + 40])) for i in range(8)]
            await asyncio.sleep(0.02)
            serve_teacher.process.send_signal(signal.SIGTERM)
            for i, scores in enumerate(await asyncio.gather(*last, return_exceptions=True)):
                if isinstance(scores, BaseException):  # it was not accepted any more
                    assert re.search("answered 503|cannot connect|disconnected|reset", str(scores))
                else:
                    assert_same([scores], [reference[0][i : i + 40]])
        finally:
            await client.close()

    asyncio.run(body())
    assert serve_teacher.process.wait(END_S) == 0
    assert "finishing what is queued" in serve_teacher.log.read_text()


def assert_same_in_json(url: str, reference: list[np.ndarray]) -> None:
    """What `curl` would do."""
    prompts, responses = ([row.tolist() for row in column] for column in rows(60))
    body = json.dumps({"teacher": "a", "prompts": prompts, "responses": responses}).encode()
    request = urllib.request.Request(f"{url}/score", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        scored = json.load(reply)["logprobs"]
    assert list(map(len, scored)) == list(map(len, responses))
    np.testing.assert_allclose(np.concatenate(scored), np.concatenate(reference), atol=1e-5)


def test_killed_outright_it_leaves_no_process(serve_teacher: ServeTeacher, tmp_path: Path) -> None:
    deadline = time.monotonic() + START_S
    while len(processes_of(tmp_path)) < 3:  # the launcher and its ranks
        assert time.monotonic() < deadline
        time.sleep(0.1)
    serve_teacher.process.kill()
    serve_teacher.process.wait()
    assert_nothing_left(tmp_path)


def test_a_run_starts_it_keeps_it_and_ends_it(
    config: Config, tmp_path: Path, reference: list[list[np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is killed takes the others along, and the service comes back at its URL."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # other servers that start on this machine now are not waited for
    run = config.run.folder
    with servers(config):
        clients = teacher_endpoints(config)["a"]
        assert [client.url for client in clients] == [files.read_endpoint(run, "service")["url"]]
        assert_same(ask_once(clients[0]), reference)
        first = processes_of(run)
        ranks = [pid for pid, words in first.items() if "megatron_mopd.mcore.serve_teacher" in words]
        assert len(ranks) == 2
        psutil.Process(ranks[1]).kill()
        wait_until_gone(first)
        assert_same(ask_once(teacher_endpoints(config)["b"][0]), reference)
        assert files.read_endpoint(run, "service")["url"] == clients[0].url
    assert not processes_of(run)
    assert not files.read_endpoints(run)


def wait_until_gone(pids: Any) -> None:
    deadline = time.monotonic() + END_S
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_what_cannot_be_served_is_refused_at_once(folder: Path, tmp_path: Path) -> None:
    run = {"folder": str(tmp_path / "run"), "num_steps": 1}
    bad = config_of(folder, run=run, service={"num_processes": 3, "megatron": {"tensor_model_parallel_size": 2}})
    said = r"service\.num_processes and service\.megatron: parallel layout: 3 processes"
    with pytest.raises(UserError, match=said), servers(bad):
        pass
    process = ServeTeacher(bad, tmp_path)
    assert process.process.wait(60) == 2
    assert len(process.log.read_text().splitlines()) == 1
    assert not (tmp_path / "run").exists()
