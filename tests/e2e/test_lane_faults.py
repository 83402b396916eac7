"""One lane's endpoint misbehaves, in every way that was thought of: other lanes do not notice, nothing is lost, nothing
is scored twice, and the error says where it was (law 10).

A real teacher service, kept by a real keeper. Lane "a" reaches it through a proxy that breaks things, "b" directly.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from scoring import config_of
from tiny import VOCAB_SIZE, write_checkpoint

from megatron_mopd.client import Client
from megatron_mopd.config import Config
from megatron_mopd.embedded.scorer import EmbeddedScorer
from megatron_mopd.errors import UserError
from megatron_mopd.protocols import EndpointDown, TeacherScorer
from megatron_mopd.servers import files
from megatron_mopd.servers.keeper import CHECK_S
from megatron_mopd.servers.launch import endpoints, servers
from megatron_mopd.service.client import ServiceClient
from megatron_mopd.teachers.lanes import Lane, Lanes, score_request
from megatron_mopd.trajectory_file import Sampled
from megatron_mopd.types import Graded, Prompt, RenderedPrompt, Segment, Trajectory
from tools.faulty_proxy import FAULTS, FaultyProxy

COUNT = 40
HARMLESS = ("duplicate",)
"""Faults that nobody but the service notices."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("faults")
    for seed, name in enumerate(("a", "b")):
        write_checkpoint(root / name, seed)
    return root


@pytest.fixture(scope="module")
def config(folder: Path) -> Iterator[Config]:
    teachers = {"batch_tokens": 150, "max_in_flight": 2, "attempt_timeout_s": 2.0, "max_attempts": 100}
    config = config_of(folder, run={"folder": str(folder / "run"), "num_steps": 1}, teachers=teachers)
    with servers(config):
        yield config


@pytest.fixture
def url(config: Config) -> str:
    wait_until_there(config)
    time.sleep(4 * CHECK_S)  # the keeper sees it too: a service that dies before it was healthy has few more tries
    return endpoints(config.run.folder)["service"]


def trajectories(name: str, seed: int) -> list[Sampled]:
    rng = np.random.default_rng(seed)
    sampled = []
    for i in range(COUNT):
        n, ids = 1 + i % 9, tuple(rng.integers(0, VOCAB_SIZE, 14).tolist())
        prompt = RenderedPrompt(Prompt(f"{name}{i}", "d", name, "e", ()), ids[:5], ids[:5])
        segment = Segment(ids[5 : 5 + n], (-1.0,) * n, (True,) * n, 0)
        sampled.append(Sampled(Trajectory(f"{i}/{name}@0", prompt, (segment,), "stop"), 0))
    return sampled


def lanes_of(config: Config, endpoint_of: dict[str, TeacherScorer], **settings: float) -> Lanes:
    table = config.teachers.model_copy(update=settings)
    return Lanes({name: Lane(name, [endpoint], table) for name, endpoint in endpoint_of.items()}, table)


@asynccontextmanager
async def started(lanes: Lanes) -> AsyncIterator[None]:
    try:
        await lanes.start()
        yield
    finally:
        await lanes.close()


def submit(lanes: Lanes, seed: int) -> None:
    for of_a, of_b in zip(trajectories("a", seed), trajectories("b", seed), strict=True):
        lanes.submit("a", of_a)
        lanes.submit("b", of_b)


def assert_each_scored_once(graded: list[Graded], folder: Path) -> None:
    """By its own teacher, as transformers would."""
    assert sorted(g.trajectory.id for g in graded) == sorted(f"{i}/{name}@0" for i in range(COUNT) for name in "ab")
    for name in "ab":
        of_lane = [g for g in graded if g.teacher == name]
        assert [g.trajectory.id for g in of_lane] == [f"{i}/{name}@0" for i in range(COUNT)]
        embedded = EmbeddedScorer({name: folder / name})
        requests = [score_request(g.trajectory) for g in of_lane]
        want = asyncio.run(score_and_close(embedded, name, requests))
        for g, logprobs in zip(of_lane, want, strict=True):
            np.testing.assert_allclose(g.teacher_logprobs, logprobs, atol=1e-5)


async def score_and_close(scorer: TeacherScorer, name: str, requests: list) -> list[np.ndarray]:
    try:
        return await scorer.score(name, requests)
    finally:
        await scorer.close()


def scored_tokens(url: str, teacher: str) -> int:
    text = urllib.request.urlopen(f"{url}/metrics").read().decode()
    found = re.search(rf'^\S*scored_tokens_total{{teacher="{teacher}"}} (\d+)', text, re.MULTILINE)
    return int(found[1]) if found else 0


def wait_until_there(config: Config) -> None:
    async def body() -> None:
        client = ServiceClient(endpoints(config.run.folder)["service"], config)
        while True:
            try:
                await client.prepare("a")
                break
            except ConnectionError:
                await asyncio.sleep(0.1)
        await client.close()

    asyncio.run(asyncio.wait_for(body(), 180))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_delays_its_own_lane_and_nothing_is_lost_or_scored_twice(
    fault: str, config: Config, url: str, folder: Path
) -> None:
    sick = asyncio.Event()
    seed = 100 + list(FAULTS).index(fault)
    proxy = FaultyProxy(url, lambda teacher: fault if sick.is_set() else None)

    async def body() -> list[Graded]:
        async with proxy.serve() as broken:
            lanes = lanes_of(config, {"a": ServiceClient(broken, config), "b": ServiceClient(url, config)})
            async with started(lanes):
                sick.set()
                submit(lanes, seed)
                for name in "ab":
                    lanes[name].send()
                await lanes["b"].wait(60)
                assert lanes["b"].is_scored
                while not proxy.seen[fault] >= 3:
                    await asyncio.sleep(0.05)
                assert fault in HARMLESS or not lanes["a"].is_scored
                sick.clear()
                return await lanes.drain(0)

    before = {name: scored_tokens(url, name) for name in "ab"}
    graded = asyncio.run(asyncio.wait_for(body(), 120))
    assert_each_scored_once(graded, folder)
    for name in "ab":
        tokens = sum(len(g.teacher_logprobs) for g in graded if g.teacher == name)
        assert scored_tokens(url, name) - before[name] == tokens, "scored once"


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in HARMLESS])
def test_a_fault_that_stays_ends_in_an_error_that_names_teacher_endpoint_and_trajectory(
    fault: str, config: Config, url: str
) -> None:
    async def body() -> None:
        async with FaultyProxy(url, lambda teacher: fault).serve() as broken:
            lanes = lanes_of(
                config, {"a": ServiceClient(broken, config)}, max_attempts=2, attempt_timeout_s=0.5, batch_tokens=1000
            )
            async with started(lanes):
                for sampled in trajectories("a", 7):
                    lanes.submit("a", sampled)
                with pytest.raises(UserError, match=rf"^teacher a, trajectory 0/a@0 and 39 more: .*{broken} is down: "):
                    await lanes.drain(0)
                assert len(lanes.held) == COUNT

    asyncio.run(asyncio.wait_for(body(), 60))


def test_a_killed_service_delays_its_own_lane_and_comes_back(config: Config, url: str, folder: Path) -> None:
    async def body() -> list[Graded]:
        embedded = EmbeddedScorer({"b": folder / "b"})
        lanes = lanes_of(config, {"a": ServiceClient(url, config), "b": embedded})
        async with started(lanes):
            os.killpg(files.read_endpoint(config.run.folder, "service")["pid"], signal.SIGKILL)
            submit(lanes, 8)
            lanes["b"].send()
            await lanes["b"].wait(60)
            assert lanes["b"].is_scored
            assert not lanes["a"].is_scored
            return await lanes.drain(0)

    assert_each_scored_once(asyncio.run(asyncio.wait_for(body(), 240)), folder)


async def until_gone(url: str) -> None:
    async with Client(silence_s=5.0) as client:
        with contextlib.suppress(EndpointDown):
            while True:
                await client.get(url, "/health")
                await asyncio.sleep(0.02)


def test_a_service_that_returns_with_other_weights_is_refused(config: Config, url: str, folder: Path) -> None:
    async def body() -> None:
        lanes = lanes_of(config, {"a": ServiceClient(url, config)})
        async with started(lanes):
            os.killpg(files.read_endpoint(config.run.folder, "service")["pid"], signal.SIGKILL)
            await until_gone(url)  # a rank sees the end of its launcher within half a second
            write_checkpoint(folder / "other", 77)
            shutil.copyfile(folder / "other" / "model.safetensors", folder / "a" / "model.safetensors")
            for sampled in trajectories("a", 9):
                lanes.submit("a", sampled)
            with pytest.raises(UserError, match=rf"^teacher a, trajectory .*{url} serves other weights as teacher a: "):
                await lanes.drain(0)
            assert all(sampled.teacher_logprobs is None for sampled in lanes.held)

    asyncio.run(asyncio.wait_for(body(), 240))
