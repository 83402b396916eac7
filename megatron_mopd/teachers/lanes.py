"""Lanes: one per teacher, with a queue of its own, its own endpoints and its own failures.

A finished trajectory waits in its teacher's lane and is scored while others are still sampled. What is sent together
depends on the order of arrival alone (a lane sends once `batch_tokens` wait, the rest with the last of its step), so
the scores of a step are reproducible to the bit where the endpoint's are. A batch is one request to one endpoint: it is
tried again, there or at a replica, until its whole reply has been checked (fleet.py has the circuit breaker and the
back-off).

Where no endpoint of a lane answers, its trajectories wait. The step goes on without them once the lane has been waited
for `lag_after_s`, as long as none of them will be trained on more than `max_lag_steps` after the step that sampled it;
then it waits, and says so.

Promises (tests/unit/test_lanes.py, tests/e2e/test_lane_faults.py): each trajectory is scored once, by the teacher of
its cell, and none is lost; the failures of a lane delay no other lane; an error names the teacher, the endpoint and the
trajectory.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_mopd.config import Teachers
from megatron_mopd.errors import UserError
from megatron_mopd.fleet import Fleet, Patience
from megatron_mopd.protocols import EndpointDown, HiddenScorer, ScoreRequest, TeacherScorer
from megatron_mopd.scores import Scores, problem_of_hidden
from megatron_mopd.telemetry.trace import NO_TRACE, Trace
from megatron_mopd.trajectory_file import Sampled
from megatron_mopd.types import Graded, Trajectory


@dataclass(eq=False)
class _Batch:
    sampled: list[Sampled]
    scores: asyncio.Future[list[Scores]]


class Lane:
    """The trajectories of one teacher, and the endpoints that can score them."""

    def __init__(
        self,
        teacher: str,
        scorers: Sequence[TeacherScorer],
        settings: Teachers,
        *,
        start_timeout_s: float = 900.0,
        start_option: str = "teachers",
        check_hope: Callable[[], None] = lambda: None,
        with_hidden: bool = False,
        trace: Trace = NO_TRACE,
    ) -> None:
        """`with_hidden`: hidden states are asked for, of scorers that give them."""
        self.teacher, self._settings, self._trace = teacher, settings, trace
        self._with_hidden = with_hidden
        self._scorers = {scorer.url: scorer for scorer in scorers}
        patience = Patience(
            start_timeout_s,
            start_option,
            settings.recovery_timeout_s,
            "teachers.recovery_timeout_s",
            settings.max_attempts,
            settings.attempt_timeout_s,
        )
        self._fleet = Fleet(
            f"teacher {teacher}",
            list(self._scorers),
            lambda url: self._scorers[url].prepare(teacher),
            patience,
            max_requests=settings.max_in_flight,
            check_hope=check_hope,
        )
        self._waiting: list[Sampled] = []
        self._waiting_tokens = 0
        self._sent: list[_Batch] = []
        self.to_come = 0
        """Submissions until what waits is sent, however little it is; 0 or less: that is not known."""

    async def start(self) -> None:
        """Return once every endpoint is there and has this teacher."""
        await self._fleet.start()

    async def close(self) -> None:
        for batch in self._sent:
            batch.scores.cancel()
        await asyncio.gather(*(batch.scores for batch in self._sent), return_exceptions=True)
        await self._fleet.close()
        for scorer in self._scorers.values():
            await scorer.close()

    def submit(self, sampled: Sampled) -> None:
        self.to_come -= 1
        if (known := self._known(sampled)) is not None:
            scores = asyncio.get_running_loop().create_future()
            scores.set_result([known])
            self._sent.append(_Batch([sampled], scores))
            return
        t = sampled.trajectory
        self._waiting.append(sampled)
        self._waiting_tokens += len(t.prompt.teacher_ids) + len(t.response_ids)
        if self._waiting_tokens >= self._settings.batch_tokens or self.to_come == 0:
            self.send()

    def _known(self, sampled: Sampled) -> Scores | None:
        """By an earlier process; scores without hidden states are none where those are needed."""
        if sampled.teacher_logprobs is None or (self._with_hidden and sampled.teacher_hidden is None):
            return None
        return Scores(sampled.teacher_logprobs, sampled.teacher_hidden if self._with_hidden else None)

    def send(self) -> None:
        """Do not wait for more to be sent together with what waits."""
        if self._waiting:
            batch, self._waiting, self._waiting_tokens = self._waiting, [], 0
            requests = [score_request(sampled.trajectory) for sampled in batch]
            self._sent.append(_Batch(batch, asyncio.create_task(self._score(requests))))

    async def score(self, requests: Sequence[ScoreRequest]) -> list[np.ndarray]:
        """One batch, at whatever endpoint: float32 log-probs [R] per request."""
        return [scores.logprobs for scores in await self._score(requests)]

    async def _score(self, requests: Sequence[ScoreRequest]) -> list[Scores]:
        first, others = requests[0].trajectory_id, len(requests) - 1
        what = f"teacher {self.teacher}, trajectory {first}" + (f" and {others} more" if others else "")

        async def attempt(url: str) -> list[Scores]:
            tokens = sum(request.num_tokens for request in requests)
            with self._trace.span(
                f"score {self.teacher}", f"lane {self.teacher}", url=url, trajectories=len(requests), tokens=tokens
            ):
                replies = await self._ask(self._scorers[url], requests)
            _check_replies(url, requests, replies, self._with_hidden)
            return replies

        try:
            return await self._fleet.run(what, attempt)
        except UserError as error:
            raise UserError(str(error) if str(error).startswith(what) else f"{what}: {error}") from error

    async def _ask(self, scorer: TeacherScorer, requests: Sequence[ScoreRequest]) -> list[Scores]:
        if not self._with_hidden:
            return [Scores(logprobs) for logprobs in await scorer.score(self.teacher, requests)]
        assert isinstance(scorer, HiddenScorer), "preflight lets no other backend through"
        return await scorer.score_hidden(self.teacher, requests)

    async def wait(self, timeout_s: float | None) -> None:
        """Until everything sent is scored, has failed, or the time is over."""
        if self._sent:
            await asyncio.wait([batch.scores for batch in self._sent], timeout=timeout_s)

    def take(self) -> list[Graded]:
        """What has been scored, in the order in which it came. Raises the error of the first batch that failed."""
        self.check()
        done = [batch for batch in self._sent if batch.scores.done()]
        self._sent = [batch for batch in self._sent if batch not in done]
        return [
            Graded(sampled.trajectory, self.teacher, scores.logprobs, scores.hidden)
            for batch in done
            for sampled, scores in zip(batch.sampled, batch.scores.result(), strict=True)
        ]

    def check(self) -> None:
        """Raise the error of the first batch that failed."""
        for batch in self._sent:
            if batch.scores.done():
                batch.scores.result()

    @property
    def held(self) -> list[Sampled]:
        """What was submitted and not taken, with its scores where it has some."""
        held = []
        for batch in self._sent:
            scored = batch.scores.done() and batch.scores.exception() is None
            scores = batch.scores.result() if scored else [(None, None)] * len(batch.sampled)
            for sampled, (logprobs, hidden) in zip(batch.sampled, scores, strict=True):
                held.append(replace(sampled, teacher_logprobs=logprobs, teacher_hidden=hidden))
        return held + self._waiting

    @property
    def is_scored(self) -> bool:
        """Nothing that was submitted waits for scores."""
        return not self._waiting and all(batch.scores.done() for batch in self._sent)

    @property
    def nothing_to_take(self) -> bool:
        return not any(batch.scores.done() for batch in self._sent)

    @property
    def urls(self) -> list[str]:
        """The endpoints that take work now."""
        return self._fleet.urls

    @property
    def is_down(self) -> bool:
        return not self.urls

    @property
    def why_down(self) -> str:
        return "; ".join(f"{server.url}: {server.why_down}" for server in self._fleet.servers if not server.up)


class Lanes:
    """All lanes of a run, and how long a step waits for them."""

    def __init__(self, lanes: Mapping[str, Lane], settings: Teachers) -> None:
        self._lanes, self._settings = dict(lanes), settings

    def __getitem__(self, teacher: str) -> Lane:
        return self._lanes[teacher]

    async def start(self) -> None:
        """Return once every teacher can score. Raises UserError for whatever would keep it from that."""
        await asyncio.gather(*(lane.start() for lane in self._lanes.values()))

    async def close(self) -> None:
        await asyncio.gather(*(lane.close() for lane in self._lanes.values()))

    def submit(self, teacher: str, sampled: Sampled) -> None:
        self._lanes[teacher].submit(sampled)

    def expect(self, counts: Mapping[str, int]) -> None:
        """So many will be submitted to each teacher from now on: after its last one a lane waits for no more."""
        for teacher, count in counts.items():
            self._lanes[teacher].to_come = count

    @property
    def held(self) -> list[Sampled]:
        """What the lanes have, lane by lane, with its scores where it has some."""
        return [sampled for lane in self._lanes.values() for sampled in lane.held]

    @property
    def _all_behind(self) -> bool:
        """A step without a trajectory would be no step."""
        return bool(self.held) and all(lane.nothing_to_take for lane in self._lanes.values())

    async def drain(self, weight_version: int) -> list[Graded]:
        """Sampling of this version has ended: what is scored by the time that the step may go on, lane by lane.

        What is left then stays in the lanes (`held`), and comes with a later step. Raises UserError where a lane gave
        up; then everything is still held.
        """
        lanes = list(self._lanes.values())
        for lane in lanes:
            lane.send()
        await _all(self._wait(lane, weight_version) for lane in lanes)
        if self._all_behind:
            _say(f"step {weight_version} waits: every lane is behind")
        while self._all_behind:
            await asyncio.sleep(_LOOK_AGAIN_S)
        for lane in lanes:
            lane.check()
        return [graded for lane in lanes for graded in lane.take()]

    async def _wait(self, lane: Lane, weight_version: int) -> None:
        """For the lane, unless it is down and may be left behind."""
        await lane.wait(self._settings.lag_after_s if self._settings.max_lag_steps else _LOOK_AGAIN_S)
        said = False
        while not lane.is_scored:
            lag = weight_version + 1 - min(s.weight_version for s in lane.held)  # if they come with the next step
            if lane.is_down and lag <= self._settings.max_lag_steps:
                _say(f"step {weight_version} goes on without teacher {lane.teacher} ({lane.why_down})")
                return
            if lane.is_down and not said:
                _say(f"step {weight_version} waits for teacher {lane.teacher} ({lane.why_down})")
                said = True
            await lane.wait(_LOOK_AGAIN_S)
        lane.check()


_LOOK_AGAIN_S = 0.25


async def _all(waits: Iterable[Coroutine[Any, Any, None]]) -> None:
    """The first error ends all."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def score_request(trajectory: Trajectory) -> ScoreRequest:
    response_ids = tuple(trajectory.response_ids.tolist())
    return ScoreRequest(trajectory.id, trajectory.prompt.teacher_ids, response_ids)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _check_replies(url: str, requests: Sequence[ScoreRequest], replies: Sequence[Scores], with_hidden: bool) -> None:
    """A reply that is not whole is the endpoint's failure: another try, or another endpoint, may give a better one."""
    if len(replies) != len(requests):
        raise EndpointDown(url, f"it answered {len(replies)} of {len(requests)} requests")
    for request, (reply, hidden) in zip(requests, replies, strict=True):
        want, trajectory = len(request.response_ids), request.trajectory_id
        if reply.dtype != np.float32 or reply.shape != (want,):
            got = f"{reply.dtype} log-probs of shape {list(reply.shape)}"
            raise EndpointDown(url, f"{got} for the {want} response tokens of trajectory {trajectory}")
        if not np.isfinite(reply).all():
            raise EndpointDown(url, f"non-finite log-probs for trajectory {trajectory}")
        if with_hidden and (problem := problem_of_hidden(hidden, want)):
            raise EndpointDown(url, f"{problem}, of trajectory {trajectory}")
