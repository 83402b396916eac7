"""What the SGLang scorer promises beyond the contract: prefix cache, teachers that take turns, servers that die.

One server, the session's, for most tests; two of its own for those in which a server dies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract.test_scorer import assert_scores, score_requests
from running import Server, Servers, StartServers
from tiny import VOCAB_SIZE

from megatron_mopd import build
from megatron_mopd.client import Client
from megatron_mopd.config import Teachers
from megatron_mopd.errors import UserError
from megatron_mopd.protocols import ScoreRequest
from megatron_mopd.sglang.teacher_server import TeacherPlace, TeacherServer
from megatron_mopd.sglang.weights import load_folder
from megatron_mopd.teachers.lanes import Lane, Lanes
from tools.bench_scoring import compare, first_teacher, ratio_of_fastest
from tools.bench_scoring import trajectories as random_trajectories

pytestmark = pytest.mark.sglang

PROMPT = tuple(range(10, 30))


def trajectories(count: int, prompt: tuple[int, ...] = PROMPT) -> list[ScoreRequest]:
    rng = np.random.default_rng(0)
    return [
        ScoreRequest(f"{i}@0", prompt, tuple(rng.integers(0, VOCAB_SIZE, 8 + i % 5).tolist())) for i in range(count)
    ]


class Recorder:
    """Notes what a scorer's client asks of its server, and what it is told."""

    def __init__(self, scorer: TeacherServer, monkeypatch: pytest.MonkeyPatch):
        self.loaded: list[str] = []
        self.cached_tokens: list[int] = []
        post = scorer._client.post

        async def noted(url: str, path: str, body: Mapping[str, Any], silence_s: float | None = None) -> Any:
            reply = await post(url, path, body, silence_s)
            if path == "/update_weights_from_disk":
                self.loaded.append(Path(body["model_path"]).name)
            if path == "/generate":
                self.cached_tokens += [result["meta_info"]["cached_tokens"] for result in reply]
            return reply

        monkeypatch.setattr(scorer._client, "post", noted)


class OnLanes:
    """Teachers on servers as a run has them, one lane each."""

    def __init__(self, lanes: Lanes):
        self.lanes = lanes

    @classmethod
    def at(cls, server: TeacherServer) -> OnLanes:
        settings = Teachers()
        return cls(Lanes({name: Lane(name, [server], settings) for name in server.place.checkpoints}, settings))

    async def score(self, teacher: str, requests: list[ScoreRequest]) -> list[np.ndarray]:
        return await self.lanes[teacher].score(requests)


def run(scorer: OnLanes, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    async def body() -> Any:
        try:
            await scorer.lanes.start()
            return await work()
        finally:
            await scorer.lanes.close()

    return asyncio.run(body())


async def load(url: str, folder: Path, version: str) -> None:
    async with Client(60) as client:
        await load_folder(client, url, folder, version)


@pytest.fixture(scope="module")
def server(student: Server) -> Iterator[Server]:
    """The server of the session; no scorer takes it for its first teacher's by its version alone."""
    asyncio.run(load(student.url, student.checkpoint, "scorer"))
    yield student
    asyncio.run(load(student.url, student.checkpoint, "scorer"))


@pytest.fixture
def teachers(checkpoints: list[Path]) -> dict[str, Path]:
    return {"a": checkpoints[0], "b": checkpoints[1], "c": checkpoints[2]}


@pytest.fixture
def shared(server: Server, teachers: dict[str, Path]) -> TeacherServer:
    """Three teachers that share the server."""
    return TeacherServer(TeacherPlace(server.url, teachers, may_load=True), 60.0)


@pytest.fixture
def scorer(shared: TeacherServer) -> OnLanes:
    return OnLanes.at(shared)


def test_the_second_trajectory_of_a_prompt_finds_it_in_the_cache_but_never_another_teachers(
    scorer: OnLanes, shared: TeacherServer, teachers: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = trajectories(3)

    async def work() -> None:
        recorder = Recorder(shared, monkeypatch)
        for teacher in ("a", "b", "a"):
            for request in requests:
                assert_scores(await scorer.score(teacher, [request]), [request], teachers[teacher])
        assert recorder.cached_tokens == [0, len(PROMPT) - 1, len(PROMPT) - 1] * 3
        assert len(recorder.loaded) == 2

    run(scorer, work)


def test_teachers_that_share_a_server_take_turns_with_one_load_each(
    scorer: OnLanes, shared: TeacherServer, teachers: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lanes send as trajectories finish, in any order."""
    requests = score_requests(40)

    async def work() -> None:
        recorder = Recorder(shared, monkeypatch)
        lanes = [(name, requests[i::4]) for i in range(4) for name in teachers]
        scores = await asyncio.gather(*[scorer.score(name, part) for name, part in lanes])
        for (name, part), got in zip(lanes, scores, strict=True):
            assert_scores(got, part, teachers[name])
        assert recorder.loaded == [teachers["b"].name, teachers["c"].name]

    run(scorer, work)


def test_what_a_server_would_not_survive_is_refused_by_name_and_the_server_goes_on(
    scorer: OnLanes, teachers: dict[str, Path]
) -> None:
    good = trajectories(1)

    async def work() -> None:
        for ids in ((VOCAB_SIZE,), (3, -1), (5, 1 << 40)):
            with pytest.raises(UserError, match=rf"trajectory bad has token id {ids[-1]}, the vocabulary of teacher a"):
                await scorer.score("a", [*good, ScoreRequest("bad", PROMPT, ids)])
            with pytest.raises(UserError, match=rf"trajectory bad has token id {ids[-1]}"):
                await scorer.score("a", [ScoreRequest("bad", ids, (1,))])
        with pytest.raises(UserError, match=r"trajectory long has 9001 tokens, server http.* takes at most 81\d\d;"):
            await scorer.score("a", [ScoreRequest("long", (1,), (5,) * 9000)])
        assert_scores(await scorer.score("a", good), good, teachers["a"])

    run(scorer, work)


def test_a_server_given_by_url_must_hold_its_teacher_and_is_never_loaded(
    server: Server, teachers: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def given(name: str) -> TeacherServer:
        return TeacherServer(TeacherPlace(server.url, {name: teachers[name]}, may_load=False), 60.0)

    async def nothing() -> None: ...

    asyncio.run(load(server.url, teachers["a"], "theirs"))
    with pytest.raises(UserError, match=rf"{server.url} does not hold the weights of teacher b: model\.\S+ differs"):
        run(OnLanes.at(given("b")), nothing)

    shared = given("a")
    scorer = OnLanes.at(shared)

    async def work() -> None:
        recorder, requests = Recorder(shared, monkeypatch), trajectories(2)
        assert_scores(await scorer.score("a", requests), requests, teachers["a"])
        assert recorder.loaded == []
        await load(server.url, teachers["b"], "swapped")
        with pytest.raises(UserError, match="does not hold the weights of teacher a"):
            await scorer.score("a", requests)

    run(scorer, work)


def test_weights_that_somebody_else_loaded_are_never_scored_with(
    scorer: OnLanes, server: Server, teachers: dict[str, Path]
) -> None:
    """As after a restart: the server says what it serves with each result."""
    requests = trajectories(2)

    async def work() -> None:
        for foreign in ("b", "c"):
            await load(server.url, teachers[foreign], "foreign")
            assert_scores(await scorer.score("a", requests), requests, teachers["a"])

    run(scorer, work)


def test_another_temperature_is_refused(server: Server, teachers: dict[str, Path]) -> None:
    with pytest.raises(UserError, match=r"rollout\.temperature=0\.7; set rollout\.temperature=1, or another"):
        TeacherServer(TeacherPlace(server.url, teachers, may_load=True), 60.0, temperature=0.7)


@pytest.fixture(scope="module")
def pair(start_servers: StartServers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with start_servers(tmp_path_factory.mktemp("pair") / "run", students=0, teachers=3, sglang=TWO) as started:
        yield started


TWO = {"teachers": {"num_servers": 2}}
"""teachers-0 holds t0 and t2 in turn, teachers-1 holds t1."""


def test_scoring_is_as_fast_as_the_server(pair: Servers) -> None:
    """What a lane adds to a raw loop of the same requests, of which there are several: one is read while the server
    computes the next."""
    config = first_teacher(pair.config)
    config = config.model_copy(update={"teachers": config.teachers.model_copy(update={"batch_tokens": 1024})})
    seconds = asyncio.run(compare(config, random_trajectories(config, 150, prompt_tokens=32), num_rounds=8))
    assert ratio_of_fastest(seconds) >= 0.85


def test_a_dead_server_delays_its_own_teachers_alone_and_loses_nothing(pair: Servers, checkpoints: list[Path]) -> None:
    folders = {teacher.name: teacher.checkpoint for teacher in pair.config.teachers.models}
    scorer, requests = OnLanes(build.teacher_lanes(pair.config)), trajectories(200)

    async def work() -> None:
        await scorer.score("t2", requests[:1])  # teachers-0 comes back with the weights of t0
        before = pair.pid("teachers-0")
        dead = [asyncio.create_task(scorer.score(name, requests)) for name in ("t2", "t0", "t2")]
        await asyncio.sleep(0.05)
        pair.kill("teachers-0")
        for _ in range(3):
            assert_scores(await scorer.score("t1", requests), requests, folders["t1"])
        assert not any(task.done() for task in dead)
        for task, name in zip(dead, ("t2", "t0", "t2"), strict=True):
            assert_scores(await task, requests, folders[name])
        assert pair.pid("teachers-0") != before

    run(scorer, work)


def test_a_server_that_stays_dead_ends_in_an_error_that_names_all(pair: Servers) -> None:
    teachers = pair.config.teachers.model_copy(update={"recovery_timeout_s": 1.0})
    lanes = build.teacher_lanes(pair.config.model_copy(update={"teachers": teachers}))
    scorer, url = OnLanes(lanes), pair.urls["teachers-1"]

    async def work() -> None:
        pair.kill("teachers-1")
        with pytest.raises(UserError, match=rf"teacher t1, trajectory 0@0 and 1 more: .*within 1 s .*{url}"):
            await scorer.score("t1", trajectories(2))

    run(scorer, work)
