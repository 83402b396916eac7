"""Lanes lose nothing, score nothing twice and do not wait for one another (law 10)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest

from megatron_mopd import fleet as fleet_module
from megatron_mopd.config import Teachers
from megatron_mopd.errors import UserError
from megatron_mopd.protocols import EndpointDown, ScoreRequest
from megatron_mopd.scores import Scores
from megatron_mopd.teachers import lanes as lanes_module
from megatron_mopd.teachers.lanes import Lane, Lanes
from megatron_mopd.trajectory_file import Sampled
from megatron_mopd.types import Graded, Prompt, RenderedPrompt, Segment, Trajectory

Reply = Callable[[Sequence[ScoreRequest], ScoreRequest], np.ndarray]


def sampled(k: int, tokens: int = 3, version: int = 0) -> Sampled:
    prompt = RenderedPrompt(Prompt(f"p{k}", "law", "low", "e", ()), (1, 2), (1, 2))
    segment = Segment(tuple(range(tokens)), (-1.0,) * tokens, (True,) * tokens, version)
    return Sampled(Trajectory(f"t{k}", prompt, (segment,), "stop"), version)


def length_of_batch(batch: Sequence[ScoreRequest], request: ScoreRequest) -> np.ndarray:
    """So that the composition of batches shows."""
    return np.full(len(request.response_ids), len(batch), np.float32)


class Endpoint:
    """Does as it is told: `alive` while it answers, `reply` while what it answers is right."""

    def __init__(self, url: str = "there", reply: Reply = length_of_batch, delay: float = 0.0):
        self.url, self.reply, self.delay = url, reply, delay
        self.batches: list[list[str]] = []
        self.alive = True

    async def prepare(self, teacher: str) -> None:
        if not self.alive:
            raise EndpointDown(self.url, "cannot connect")

    async def score(self, teacher: str, requests: Sequence[ScoreRequest]) -> list[np.ndarray]:
        await self.prepare(teacher)
        self.batches.append([r.trajectory_id for r in requests])
        await asyncio.sleep(self.delay)
        return [self.reply(requests, r) for r in requests]

    async def score_hidden(self, teacher: str, requests: Sequence[ScoreRequest]) -> list[Scores]:
        logprobs = await self.score(teacher, requests)
        return [Scores(row, self.hidden(request)) for row, request in zip(logprobs, requests, strict=True)]

    def hidden(self, request: ScoreRequest) -> np.ndarray | None:
        return np.full((len(request.response_ids), 2), len(request.trajectory_id), np.float32)

    async def close(self) -> None: ...


def lanes_of(endpoints: dict[str, list[Endpoint]], **settings: Any) -> Lanes:
    table = Teachers(**{"batch_tokens": 10, "recovery_timeout_s": 5.0, "max_attempts": 3, **settings})
    return Lanes({name: Lane(name, of_lane, table) for name, of_lane in endpoints.items()}, table)


def run(lanes: Lanes, work: Callable[[], Any]) -> Any:
    async def body() -> Any:
        try:
            await lanes.start()
            return await work()
        finally:
            await lanes.close()

    return asyncio.run(asyncio.wait_for(body(), 30))


def ids(graded: Sequence[Graded]) -> list[str]:
    return [g.trajectory.id for g in graded]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "PROBE_INTERVAL_S", 0.02)
    monkeypatch.setattr(lanes_module, "_LOOK_AGAIN_S", 0.01)


@pytest.mark.parametrize("delay", [0.0, 0.01])
def test_lane_sends_by_arrival_and_scores_each_trajectory_once(delay: float) -> None:
    endpoint = Endpoint(delay=delay)
    lanes = lanes_of({"a": [endpoint]})

    async def work() -> tuple[list[Graded], list[Graded]]:
        for k in range(5):
            lanes.submit("a", sampled(k))
            await asyncio.sleep(0)
        return await lanes.drain(0), await lanes.drain(0)

    graded, again = run(lanes, work)
    assert endpoint.batches == [["t0", "t1"], ["t2", "t3"], ["t4"]]
    assert ids(graded) == ["t0", "t1", "t2", "t3", "t4"]
    assert [g.teacher_logprobs[0] for g in graded] == [2, 2, 2, 2, 1]
    assert again == []


def test_the_last_one_of_a_step_is_scored_while_other_lanes_are_still_sampled() -> None:
    endpoints = {"a": Endpoint(), "b": Endpoint()}
    lanes = lanes_of({name: [endpoint] for name, endpoint in endpoints.items()})

    async def work() -> list[list[str]]:
        lanes.expect({"a": 3, "b": 2})
        for k in range(3):
            lanes.submit("a", sampled(k))
        lanes.submit("b", sampled(3))
        await asyncio.sleep(0.05)
        before = [[*batch] for endpoint in endpoints.values() for batch in endpoint.batches]
        lanes.submit("b", sampled(4))
        assert ids(await lanes.drain(0)) == ["t0", "t1", "t2", "t3", "t4"]
        return before

    assert run(lanes, work) == [["t0", "t1"], ["t2"]]
    assert endpoints["b"].batches == [["t3", "t4"]]


@pytest.mark.parametrize(("expected", "batches"), [(1, [["t0"]]), (2, [["t0", "t1"]]), (5, [["t0", "t1"]])])
def test_however_many_were_expected_each_one_is_scored_once(expected: int, batches: list[list[str]]) -> None:
    """Sampling may end early, and what an earlier process left behind comes on top; an empty response is one, too."""
    endpoint = Endpoint()
    lanes = lanes_of({"a": [endpoint], "b": [Endpoint("idle")]}, batch_tokens=100)

    async def work() -> list[list[Graded]]:
        lanes.submit("a", Sampled(sampled(9).trajectory, 0, np.zeros(3, np.float32)))  # scored before
        lanes.expect({"a": expected})
        for k in range(2):
            lanes.submit("a", sampled(k, tokens=3 * k))
        first = await lanes.drain(0)
        lanes.expect({"a": 1})
        lanes.submit("a", sampled(7))
        await lanes["a"].wait(5.0)
        assert not lanes["a"].nothing_to_take, "the one of a step of one is not waited with"
        return [first, await lanes.drain(1)]

    first, second = run(lanes, work)
    assert sorted(ids(first)) == ["t0", "t1", "t9"]
    assert [len(g.teacher_logprobs) for g in first if g.trajectory.id == "t0"] == [0]
    assert ids(second) == ["t7"]
    assert sorted(chain.from_iterable(endpoint.batches)) == ["t0", "t1", "t7"]
    assert endpoint.batches[: len(batches)] == batches


def test_an_endpoint_that_dies_before_the_last_one_comes_costs_nothing() -> None:
    endpoint = Endpoint(delay=0.05)
    lanes = lanes_of({"a": [endpoint]}, batch_tokens=10)

    async def work() -> list[Graded]:
        lanes.expect({"a": 3})
        lanes.submit("a", sampled(0))
        lanes.submit("a", sampled(1))  # sent
        endpoint.alive = False
        await asyncio.sleep(0.1)
        lanes.submit("a", sampled(2))
        draining = asyncio.create_task(lanes.drain(0))
        await asyncio.sleep(0.1)
        assert not draining.done()
        endpoint.alive = True
        return await draining

    assert ids(run(lanes, work)) == ["t0", "t1", "t2"]
    assert endpoint.batches == [["t0", "t1"], ["t2"]]


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (lambda b, r: np.zeros(len(r.response_ids) - 1, np.float32), r"of shape \[2\] for the 3 response tokens of"),
        (lambda b, r: np.zeros(len(r.response_ids), np.float64), "float64 log-probs of shape"),
        (lambda b, r: np.full(3, np.nan, np.float32), "non-finite log-probs for"),
    ],
)
def test_a_wrong_reply_is_asked_for_again_and_ends_in_an_error_that_names_all(reply: Reply, reason: str) -> None:
    endpoint = Endpoint("http://there", reply)
    lanes = lanes_of({"a": [endpoint]})

    async def work() -> None:
        lanes.submit("a", sampled(0))
        with pytest.raises(UserError, match=rf"^teacher a, trajectory t0: .*http://there is down: .*{reason}.* t0"):
            await lanes.drain(0)
        assert [s.trajectory.id for s in lanes.held] == ["t0"], "it is still there to be kept"

    run(lanes, work)
    assert len(endpoint.batches) == 3

    once = Endpoint(reply=lambda b, r: reply(b, r) if len(once.batches) == 1 else length_of_batch(b, r))
    lanes = lanes_of({"a": [once]})

    async def again() -> list[Graded]:
        lanes.submit("a", sampled(0))
        return await lanes.drain(0)

    assert ids(run(lanes, again)) == ["t0"]


def test_a_reply_with_too_few_or_too_many_rows_is_not_used() -> None:
    class Short(Endpoint):
        async def score(self, teacher: str, requests: Sequence[ScoreRequest]) -> list[np.ndarray]:
            replies = await super().score(teacher, requests)
            return replies[1:] if len(self.batches) == 1 else replies * 2 if len(self.batches) == 2 else replies

    lanes = lanes_of({"a": [Short()]})

    async def work() -> list[Graded]:
        lanes.submit("a", sampled(0))
        lanes.submit("a", sampled(1))
        return await lanes.drain(0)

    assert ids(run(lanes, work)) == ["t0", "t1"]


def test_a_replica_does_the_work_of_a_dead_one() -> None:
    dead, alive = Endpoint("one"), Endpoint("two")
    lanes = lanes_of({"a": [dead, alive]})

    async def work() -> list[Graded]:
        dead.alive = False
        for k in range(20):
            lanes.submit("a", sampled(k))
        return await lanes.drain(0)

    assert ids(run(lanes, work)) == [f"t{k}" for k in range(20)]
    assert not dead.batches


def test_a_dead_lane_holds_up_its_own_step_and_no_other_lane(capsys: pytest.CaptureFixture[str]) -> None:
    dead, alive = Endpoint("one"), Endpoint("two")
    lanes = lanes_of({"a": [dead], "b": [alive]})

    async def work() -> list[Graded]:
        dead.alive = False
        for k in range(4):
            lanes.submit("a", sampled(k))
            lanes.submit("b", sampled(10 + k))
        draining = asyncio.create_task(lanes.drain(0))
        await asyncio.sleep(0.2)
        assert lanes["b"].is_scored
        assert not draining.done()
        dead.alive = True
        return await draining

    assert ids(run(lanes, work)) == ["t0", "t1", "t2", "t3", "t10", "t11", "t12", "t13"]
    assert "step 0 waits for teacher a (one: cannot connect)" in capsys.readouterr().err


def test_a_step_goes_on_without_a_dead_lane_up_to_the_stated_lag(capsys: pytest.CaptureFixture[str]) -> None:
    """With a lag of 2, what was sampled at step 0 is trained on at step 2 at the latest: steps 0 and 1 go without."""
    dead, alive = Endpoint("one"), Endpoint("two")
    lanes = lanes_of({"a": [dead], "b": [alive]}, max_lag_steps=2, lag_after_s=0.05)

    async def work() -> None:
        dead.alive = False
        for step in range(2):
            lanes.submit("a", sampled(step, version=step))
            lanes.submit("b", sampled(10 + step, version=step))
            assert ids(await lanes.drain(step)) == [f"t{10 + step}"]
            assert [s.trajectory.id for s in lanes.held] == [f"t{k}" for k in range(step + 1)]
        lanes.submit("b", sampled(12, version=2))
        last = asyncio.create_task(lanes.drain(2))
        await asyncio.sleep(0.3)
        assert not last.done()
        dead.alive = True
        assert ids(await last) == ["t0", "t1", "t12"]
        assert not lanes.held

    run(lanes, work)
    said = capsys.readouterr().err
    assert "step 1 goes on without teacher a (one: cannot connect)" in said
    assert "step 2 waits for teacher a" in said


def test_a_slow_lane_is_waited_for_because_it_is_alive() -> None:
    lanes = lanes_of({"a": [Endpoint("one", delay=0.3)], "b": [Endpoint("two")]}, max_lag_steps=5, lag_after_s=0.05)

    async def work() -> list[Graded]:
        lanes.submit("a", sampled(0))
        lanes.submit("b", sampled(1))
        return await lanes.drain(0)

    assert ids(run(lanes, work)) == ["t0", "t1"]


def test_no_step_is_empty_because_every_lane_is_behind(capsys: pytest.CaptureFixture[str]) -> None:
    endpoint = Endpoint()
    lanes = lanes_of({"a": [endpoint]}, max_lag_steps=5, lag_after_s=0.05)

    async def work() -> list[Graded]:
        endpoint.alive = False
        lanes.submit("a", sampled(0))
        draining = asyncio.create_task(lanes.drain(0))
        await asyncio.sleep(0.7)
        assert not draining.done()
        endpoint.alive = True
        return await draining

    assert ids(run(lanes, work)) == ["t0"]
    assert capsys.readouterr().err.count("step 0 waits: every lane is behind") == 1


def test_a_lane_that_stays_dead_ends_the_step_at_once_with_everything_still_held() -> None:
    dead, slow = Endpoint("http://one"), Endpoint("two", delay=20.0)
    lanes = lanes_of({"a": [dead], "b": [slow], "c": [Endpoint("three")]}, recovery_timeout_s=0.3)

    async def work() -> None:
        dead.alive = False
        for k, name in enumerate("abc"):
            lanes.submit(name, sampled(k))
        with pytest.raises(UserError, match=r"^teacher a, trajectory t0: .*within 0.3 s .*http://one: cannot connect"):
            await lanes.drain(0)
        held = {s.trajectory.id: s.teacher_logprobs for s in lanes.held}
        assert held.keys() == {"t0", "t1", "t2"}
        assert held["t0"] is None
        assert held["t2"] is not None, "it is not scored again"

    run(lanes, work)


def test_what_is_already_scored_is_not_scored_again() -> None:
    endpoint = Endpoint()
    lanes = lanes_of({"a": [endpoint]})
    scores = np.array([-1, -2, -3], np.float32)

    async def work() -> list[Graded]:
        s = sampled(0)
        lanes.submit("a", Sampled(s.trajectory, 0, scores))
        lanes.submit("a", sampled(1))
        return await lanes.drain(0)

    graded = run(lanes, work)
    assert ids(graded) == ["t0", "t1"]
    np.testing.assert_array_equal(graded[0].teacher_logprobs, scores)
    assert endpoint.batches == [["t1"]]


def test_hidden_states_come_with_the_scores_where_they_are_asked_for() -> None:
    """Scores that an earlier process got without them are got again, scores with them are kept."""
    endpoint, table = Endpoint(), Teachers(batch_tokens=10)
    lanes = Lanes({"a": Lane("a", [endpoint], table, with_hidden=True)}, table)
    scores, hidden = np.zeros(3, np.float32), np.zeros((3, 2), np.uint16)

    async def work() -> list[Graded]:
        lanes.submit("a", sampled(0))
        lanes.submit("a", replace(sampled(1), teacher_logprobs=scores))
        lanes.submit("a", replace(sampled(2), teacher_logprobs=scores, teacher_hidden=hidden))
        await lanes["a"].wait(5.0)
        assert [s.teacher_hidden is not None for s in lanes.held] == [True] * 3
        return await lanes.drain(0)

    graded = {g.trajectory.id: g.teacher_hidden for g in run(lanes, work)}
    assert endpoint.batches == [["t0", "t1"]]
    assert graded["t2"] is hidden
    np.testing.assert_array_equal(graded["t1"], endpoint.hidden(ScoreRequest("t1", (), (1, 2, 3))))


def test_wrong_hidden_states_are_a_failure_of_the_endpoint() -> None:
    endpoint, table = Endpoint("http://there"), Teachers(batch_tokens=10, max_attempts=2)
    endpoint.hidden = lambda request: np.full((len(request.response_ids), 2), np.nan, np.float32)
    lanes = Lanes({"a": Lane("a", [endpoint], table, with_hidden=True)}, table)

    async def work() -> Any:
        lanes.submit("a", sampled(0))
        await lanes.drain(0)

    with pytest.raises(UserError, match=r"teacher a, trajectory t0: .*http://there.* hidden state that is not finite"):
        run(lanes, work)
