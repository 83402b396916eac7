"""The queue of the teacher service: rows of requests go in, batches for one teacher at a time come out.

A switch of weights costs time, so the teacher in hand goes on while it has rows, but once its turn has lasted TURN_S
and others wait, the one that has waited longest is next. Requests of a teacher are taken in order of arrival, merged up
to `batch_tokens` and sorted by length; a request may be spread over batches. One thread adds, another takes.

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

TURN_S = 10.0


class QueueFull(Exception):
    """The rows that wait already leave no room."""


class Request:
    """Rows that are answered together. `settle` is called once, by the thread that computes: with all scores, in the
    order of the rows, or with the error."""

    def __init__(
        self,
        teacher: str,
        prompts: Sequence[np.ndarray],
        responses: Sequence[np.ndarray],
        settle: Callable[[list[Scores] | Exception], object],
        with_hidden: bool = False,
    ):
        self.teacher, self.arrived, self._settle = teacher, time.monotonic(), settle
        self.rows = [Row(self, i, p, r) for i, (p, r) in enumerate(zip(prompts, responses, strict=True))]
        self.with_hidden = with_hidden
        self._scores = [Scores(np.zeros(0, np.float32))] * len(self.rows)
        self._open = len(self.rows)
        self.begun = self.settled = False

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    def row_done(self, index: int, scores: Scores) -> None:
        self._scores[index] = scores if self.with_hidden else Scores(scores.logprobs)
        self._open -= 1
        if self._open == 0:
            self.settle(self._scores)

    def settle(self, result: list[Scores] | Exception) -> None:
        if not self.settled:
            self.settled = True
            self.rows.clear()  # a kept reply keeps no tokens
            self._settle(result)


class Row:
    def __init__(self, request: Request, index: int, prompt: np.ndarray, response: np.ndarray):
        self.request, self.index, self.prompt, self.response = request, index, prompt, response
        self.num_tokens = len(prompt) + len(response)


class ScoreWork:
    """One batch for one teacher: int32 `prompts` and `responses` of its rows, sorted by length. Answer it with `done`
    or `failed`, once."""

    def __init__(self, teacher: str, rows: Sequence[Row], finished: Callable[[ScoreWork, int], None]):
        self.teacher, self._rows, self._finished = teacher, rows, finished
        self.prompts = [row.prompt for row in rows]
        self.responses = [row.response for row in rows]

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self._rows)

    @property
    def requests(self) -> list[Request]:
        return list(dict.fromkeys(row.request for row in self._rows))

    @property
    def with_hidden(self) -> bool:
        """Whether a row of it wants hidden states."""
        return any(row.request.with_hidden for row in self._rows)

    def done(self, scores: Sequence[Scores]) -> None:
        """Of each row; with hidden states if a row wants them."""
        lengths = [len(response) for response in self.responses]
        assert [len(row.logprobs) for row in scores] == lengths, "one log-prob per response token"
        if self.with_hidden:
            assert [None if row.hidden is None else len(row.hidden) for row in scores] == lengths, "one state per token"
        for row, of_row in zip(self._rows, scores, strict=True):
            row.request.row_done(row.index, of_row)
        self._finished(self, sum(lengths))

    def failed(self, error: Exception) -> None:
        for request in self.requests:
            request.settle(error)
        self._finished(self, 0)


class WorkQueue:
    def __init__(self, batch_tokens: int, max_waiting_tokens: int):
        self._batch_tokens, self._max_waiting_tokens = batch_tokens, max_waiting_tokens
        self._changed = threading.Condition()
        self._waiting: dict[str, deque[Row]] = {}
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
            if self.waiting_tokens and self.waiting_tokens + request.num_tokens > self._max_waiting_tokens:
                raise QueueFull
            if request.rows:
                self._waiting.setdefault(request.teacher, deque()).extend(request.rows)
                self.waiting_tokens += request.num_tokens
            self._changed.notify_all()
        if not request.rows:
            request.settle([])

    def withdraw(self, request: Request) -> bool:
        """Drop the request if nothing of it has begun; whether it was dropped."""
        with self._changed:
            if request.begun or request.settled:
                return False
            self._drop(request)
            return True

    def take(self, timeout_s: float) -> ScoreWork | None:
        """The next batch; None where nothing came in that time."""
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._waiting), timeout_s):
                return None
            self._choose_teacher()
            rows = self._first_rows(self._waiting[self._in_hand])
            if not self._waiting[self._in_hand]:
                del self._waiting[self._in_hand]
            self.waiting_tokens -= sum(row.num_tokens for row in rows)
            self._in_flight += 1
            self.num_batches += 1
        return ScoreWork(self._in_hand, sorted(rows, key=lambda row: row.num_tokens), self._finished)

    def _choose_teacher(self) -> None:
        now = time.monotonic()
        others = [teacher for teacher in self._waiting if teacher != self._in_hand]
        if self._in_hand in self._waiting and (not others or now - self._turn_began < TURN_S):
            return
        self._in_hand = min(others, key=lambda teacher: self._waiting[teacher][0].request.arrived)
        self._turn_began = now
        self.num_switches += 1

    def _first_rows(self, waiting: deque[Row]) -> list[Row]:
        rows = [waiting.popleft()]
        num_tokens = rows[0].num_tokens
        while waiting and num_tokens + waiting[0].num_tokens <= self._batch_tokens:
            num_tokens += waiting[0].num_tokens
            rows.append(waiting.popleft())
        for row in rows:
            row.request.begun = True
        return rows

    def _finished(self, work: ScoreWork, num_scored: int) -> None:
        with self._changed:
            self._in_flight -= 1
            self.scored_tokens[work.teacher] = self.scored_tokens.get(work.teacher, 0) + num_scored
            for request in work.requests:
                if request.settled:  # it failed: nobody wants the rest of it
                    self._drop(request)

    def _drop(self, request: Request) -> None:
        waiting = self._waiting.pop(request.teacher, deque())
        kept = deque(row for row in waiting if row.request is not request)
        self.waiting_tokens -= sum(row.num_tokens for row in waiting if row.request is request)
        if kept:
            self._waiting[request.teacher] = kept
