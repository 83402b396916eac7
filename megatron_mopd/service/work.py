"""The queue of the teacher service: rows of requests go in, batches for one teacher at a time come out.

A switch of weights costs time, so the teacher in hand goes on while it has rows, but once its turn has lasted TURN_S
and others wait, the one that has waited longest is next. Requests of a teacher are taken in order of arrival and merged
up to `batch_tokens`; a request may be spread over batches. One thread adds, another takes.

Promises (tests/unit/test_service_work.py): every row is in exactly one batch; a batch has at most `batch_tokens`
tokens, or one row; a teacher waits for at most a turn and a batch of each other one; a request that is withdrawn before
a row of it has begun costs nothing, and one that has begun is finished. Torch-free.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from megatron_mopd.scores import Scores
from megatron_mopd.token_rows import TokenRows

TURN_S = 10.0


class QueueFull(Exception):
    """The rows that wait already leave no room."""


class Request:
    """Rows that are answered together. `settle` is called once, by the thread that computes: with the scores of all
    rows, one after the other, or with the error."""

    def __init__(
        self,
        teacher: str,
        rows: TokenRows,
        settle: Callable[[Scores | Exception], object],
        with_hidden: bool = False,
    ):
        self.teacher, self.arrived, self._settle = teacher, time.monotonic(), settle
        self.rows, self.with_hidden = rows, with_hidden
        self.num_begun = 0
        self.waiting_tokens = len(rows.token_ids)
        """Of the rows that no batch has yet."""
        self._scores: dict[int, Scores] = {}  # by the first row that they are of
        self._open = len(rows)
        self.settled = False

    def begin(self, max_tokens: int) -> Part | None:
        """The next rows within so many tokens, if there are any."""
        first = self.num_begun
        last = int(np.searchsorted(self.rows.ends, self.rows.begin(first) + max_tokens, side="right"))
        return self._begin(last) if last > first else None

    def begin_one(self) -> Part:
        return self._begin(self.num_begun + 1)

    def _begin(self, last: int) -> Part:
        part = Part(self, self.num_begun, last)
        self.num_begun = last
        self.waiting_tokens -= len(part.rows.token_ids)
        return part

    @property
    def is_begun(self) -> bool:
        return self.num_begun == len(self.rows)

    def part_done(self, first: int, last: int, scores: Scores) -> None:
        self._scores[first] = scores if self.with_hidden else Scores(scores.logprobs)
        self._open -= last - first
        if self._open == 0:
            self.settle(_joined([self._scores[first] for first in sorted(self._scores)]))

    def settle(self, result: Scores | Exception) -> None:
        if not self.settled:
            self.settled = True
            self.rows = _NO_ROWS  # a kept reply keeps no tokens
            self._settle(result)


_NO_ROWS = TokenRows.of([], [])


def _joined(parts: Sequence[Scores]) -> Scores:
    """Copies: a kept reply does not keep the batches that it was computed in."""
    hidden = [scores.hidden for scores in parts if scores.hidden is not None]
    return Scores(np.concatenate([scores.logprobs for scores in parts]), np.concatenate(hidden) if hidden else None)


class Part:
    """The rows [first, last) of a request, in one batch."""

    def __init__(self, request: Request, first: int, last: int):
        self.request, self.first, self.last = request, first, last
        self.rows = request.rows.cut(first, last)

    def done(self, scores: Scores) -> None:
        self.request.part_done(self.first, self.last, scores)


class ScoreWork:
    """One batch of rows for one teacher. Answer it with `done` or `failed`, once."""

    def __init__(self, teacher: str, parts: Sequence[Part], finished: Callable[[ScoreWork, int], None]):
        self.teacher, self._parts, self._finished = teacher, parts, finished
        self.rows = TokenRows.joined([part.rows for part in parts])

    @property
    def requests(self) -> list[Request]:
        return [part.request for part in self._parts]

    @property
    def with_hidden(self) -> bool:
        """Whether a row of it wants hidden states."""
        return any(request.with_hidden for request in self.requests)

    def done(self, scores: Scores) -> None:
        """Of all response tokens; with hidden states if a row wants them."""
        num_tokens = self.rows.num_response_tokens
        assert len(scores.logprobs) == num_tokens, "one log-prob per response token"
        if self.with_hidden:
            assert scores.hidden is not None
            assert len(scores.hidden) == num_tokens, "one state per token"
        start = 0
        for part in self._parts:
            tokens = slice(start, start := start + part.rows.num_response_tokens)
            part.done(Scores(scores.logprobs[tokens], None if scores.hidden is None else scores.hidden[tokens]))
        self._finished(self, num_tokens)

    def failed(self, error: Exception) -> None:
        for request in self.requests:
            request.settle(error)
        self._finished(self, 0)


class WorkQueue:
    def __init__(self, batch_tokens: int, max_waiting_tokens: int):
        self._batch_tokens, self._max_waiting_tokens = batch_tokens, max_waiting_tokens
        self._changed = threading.Condition()
        self._waiting: dict[str, deque[Request]] = {}
        self._in_flight = 0
        self._in_hand, self._turn_began = "", 0.0
        self.waiting_tokens = self.num_batches = self.num_switches = 0
        self.scored_tokens: dict[str, int] = {}
        """Response tokens by teacher."""

    @property
    def idle(self) -> bool:
        with self._changed:
            return not self._waiting and not self._in_flight

    def add(self, request: Request) -> None:
        """Raises QueueFull; what is alone in the queue always has room."""
        with self._changed:
            if self.waiting_tokens and self.waiting_tokens + request.waiting_tokens > self._max_waiting_tokens:
                raise QueueFull
            if len(request.rows):
                self._waiting.setdefault(request.teacher, deque()).append(request)
                self.waiting_tokens += request.waiting_tokens
            self._changed.notify_all()
        if not len(request.rows):
            request.settle(Scores(np.zeros(0, np.float32)))

    def withdraw(self, request: Request) -> bool:
        """Drop the request if nothing of it has begun; whether it was dropped."""
        with self._changed:
            if request.num_begun or request.settled:
                return False
            self._drop(request)
            return True

    def take(self, timeout_s: float) -> ScoreWork | None:
        """The next batch; None where nothing came in that time."""
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._waiting), timeout_s):
                return None
            self._choose_teacher()
            parts = self._first_parts(self._waiting[self._in_hand])
            if not self._waiting[self._in_hand]:
                del self._waiting[self._in_hand]
            work = ScoreWork(self._in_hand, parts, self._finished)
            self.waiting_tokens -= len(work.rows.token_ids)
            self._in_flight += 1
            self.num_batches += 1
        return work

    def _choose_teacher(self) -> None:
        now = time.monotonic()
        others = [teacher for teacher in self._waiting if teacher != self._in_hand]
        if self._in_hand in self._waiting and (not others or now - self._turn_began < TURN_S):
            return
        self._in_hand = min(others, key=lambda teacher: self._waiting[teacher][0].arrived)
        self._turn_began = now
        self.num_switches += 1

    def _first_parts(self, waiting: deque[Request]) -> list[Part]:
        """Within `batch_tokens`, but at least one row."""
        parts = [waiting[0].begin(self._batch_tokens) or waiting[0].begin_one()]
        num_tokens = len(parts[0].rows.token_ids)
        while waiting[0].is_begun:
            waiting.popleft()
            if not waiting or (part := waiting[0].begin(self._batch_tokens - num_tokens)) is None:
                break
            parts.append(part)
            num_tokens += len(part.rows.token_ids)
        return parts

    def _finished(self, work: ScoreWork, num_scored: int) -> None:
        with self._changed:
            self._in_flight -= 1
            self.scored_tokens[work.teacher] = self.scored_tokens.get(work.teacher, 0) + num_scored
            for request in work.requests:
                if request.settled:  # it failed: nobody wants the rest of it
                    self._drop(request)

    def _drop(self, request: Request) -> None:
        waiting = self._waiting.get(request.teacher, deque())
        if request not in waiting:
            return
        waiting.remove(request)
        self.waiting_tokens -= request.waiting_tokens
        if not waiting:
            del self._waiting[request.teacher]
