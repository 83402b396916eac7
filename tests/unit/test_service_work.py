"""The queue of the teacher service: every row once, in bounded batches, and no teacher starves."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
from scoring import formula, hidden_of, scores_of, token_rows

from megatron_mopd.scores import Scores
from megatron_mopd.service import work as module
from megatron_mopd.service.work import QueueFull, Request, ScoreWork, WorkQueue
from megatron_mopd.token_rows import TokenRows


def request(teacher: str = "a", sizes: list[int] | None = None, settle: Any = lambda _: None) -> Request:
    """Rows of so many tokens, the first one the prompt."""
    sizes = [4] if sizes is None else sizes
    return Request(teacher, TokenRows.of([[0]] * len(sizes), [[0] * (n - 1) for n in sizes]), settle)


def take(queue: WorkQueue) -> ScoreWork:
    work = queue.take(0.0)
    assert work is not None
    return work


def finish(work: ScoreWork) -> None:
    work.done(scores_of(work))


def test_requests_are_merged_in_order_of_arrival_up_to_the_budget() -> None:
    queue = WorkQueue(batch_tokens=10, max_waiting_tokens=1000)
    for sizes in ([5, 2], [3], [4, 6], [20], [1]):
        queue.add(request(sizes=sizes))
    batches = [work.rows.lengths.tolist() for work in iter(lambda: queue.take(0.0), None)]
    assert batches == [[5, 2, 3], [4, 6], [20], [1]]


def test_every_row_gets_its_own_scores_however_requests_are_spread_over_batches() -> None:
    queue, answers = WorkQueue(batch_tokens=30, max_waiting_tokens=1 << 20), {}
    for i in range(8):
        queue.add(Request("ab"[i % 2], token_rows(13, seed=i), partial(answers.setdefault, i), with_hidden=i % 3 == 0))
    while (work := queue.take(0.0)) is not None:
        assert len(work.rows.token_ids) == work.rows.lengths.sum() <= 30
        finish(work)
    for i in range(8):
        pairs, teacher = list(token_rows(13, seed=i)), "ab"[i % 2]
        np.testing.assert_array_equal(answers[i].logprobs, np.concatenate([formula(teacher, *pair) for pair in pairs]))
        assert (answers[i].hidden is None) == (i % 3 > 0), "only where it was asked for"
        if answers[i].hidden is not None:
            want = np.concatenate([hidden_of(teacher, response) for _, response in pairs])
            np.testing.assert_array_equal(answers[i].hidden, want)
    assert queue.idle
    assert queue.waiting_tokens == 0


def test_the_teacher_in_hand_goes_on_within_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = WorkQueue(batch_tokens=4, max_waiting_tokens=1000)
    for teacher in "abacab":
        queue.add(request(teacher))
    assert [take(queue).teacher for _ in range(6)] == ["a", "a", "a", "b", "b", "c"]
    assert queue.num_switches == 3


def test_no_teacher_waits_for_more_than_a_turn_of_each_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teacher a never runs out of work; the clock goes on by one second a batch."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    queue = WorkQueue(batch_tokens=4, max_waiting_tokens=1000)
    served = []
    for _ in range(60):
        queue.add(request("a"))
        if now[0] in (20.0, 21.0):
            queue.add(request("b"))
            queue.add(request("c"))
        served.append(take(queue).teacher)
        now[0] += 1.0
    turn = int(module.TURN_S)
    assert served[:20] == ["a"] * 20
    assert {"b", "c"} <= set(served[20 : 20 + 2 * turn])
    assert (served.count("b"), served.count("c")) == (2, 2)


def test_a_full_queue_refuses_but_always_takes_one() -> None:
    queue = WorkQueue(batch_tokens=10, max_waiting_tokens=20)
    queue.add(request(sizes=[50]))
    with pytest.raises(QueueFull):
        queue.add(request(sizes=[1]))
    take(queue)
    queue.add(request(sizes=[10]))
    queue.add(request(sizes=[10]))
    with pytest.raises(QueueFull):
        queue.add(request(sizes=[1]))


def test_a_request_is_withdrawn_whole_or_not_at_all() -> None:
    queue = WorkQueue(batch_tokens=4, max_waiting_tokens=1000)
    begun, waiting = request(sizes=[4, 4]), request(sizes=[4, 4])
    queue.add(begun)
    queue.add(waiting)
    take(queue)
    assert not queue.withdraw(begun)
    assert queue.withdraw(waiting)
    assert queue.waiting_tokens == 4
    take(queue)
    assert queue.take(0.0) is None


def test_a_failure_is_that_of_the_requests_in_the_batch_alone() -> None:
    queue, answers = WorkQueue(batch_tokens=8, max_waiting_tokens=1000), {}
    for name, sizes in (("x", [4, 4, 4]), ("y", [4])):
        queue.add(request(sizes=sizes, settle=lambda result, name=name: answers.setdefault(name, result)))
    take(queue).failed(RuntimeError("no memory"))
    assert str(answers.pop("x")) == "no memory"
    finish(take(queue))  # nobody computes the rest of x
    assert len(answers["y"].logprobs) == 3
    assert queue.idle


def test_who_waits_for_work_is_woken() -> None:
    queue = WorkQueue(batch_tokens=8, max_waiting_tokens=1000)
    threading.Timer(0.05, queue.add, [request()]).start()
    assert queue.take(5.0) is not None


def test_rows_without_a_request_and_wrong_counts_are_no_answer() -> None:
    queue, answers = WorkQueue(batch_tokens=8, max_waiting_tokens=1000), []
    queue.add(request(sizes=[], settle=answers.append))
    assert [len(scores.logprobs) for scores in answers] == [0]
    queue.add(request())
    with pytest.raises(AssertionError):
        take(queue).done(Scores(np.zeros(4, np.float32)))
