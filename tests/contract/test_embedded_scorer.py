"""What the embedded scorer promises beyond the contract: other temperatures, and the same bits again."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract.test_engine import MakeEngine
from contract.test_scorer import (
    MakeScorer,
    assert_own_teacher_earns_nothing,
    assert_scores,
    score,
    score_requests,
    score_side_by_side,
)
from tiny import VOCAB_SIZE

from megatron_mopd.embedded import scorer as embedded_scorer


def test_one_tempered_logprob_per_response_token(make_scorer: MakeScorer, student: Path) -> None:
    requests = score_requests()
    assert_scores(score(make_scorer({"t": student}, temperature=0.7), requests), requests, student, 0.7)


def test_a_student_that_is_its_own_teacher_earns_nothing_at_any_temperature(
    make_engine: MakeEngine, make_scorer: MakeScorer, student: Path
) -> None:
    assert_own_teacher_earns_nothing(make_engine, make_scorer, student, 0.7)


def test_small_passes_and_chunks_give_the_same_scores(student: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = score(embedded_scorer.EmbeddedScorer({"t": student}), score_requests())
    monkeypatch.setattr(embedded_scorer, "_PASS_TOKENS", 20)
    monkeypatch.setattr(embedded_scorer, "_LOGITS", 2 * VOCAB_SIZE)
    for a, b in zip(want, score(embedded_scorer.EmbeddedScorer({"t": student}), score_requests()), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_teachers_side_by_side_give_the_bits_they_give_alone(
    make_scorer: MakeScorer, student: Path, update: Path
) -> None:
    teachers = {"one": student, "two": update}
    requests, names = score_requests(30), ("one", "two", "one", "two")
    together = score_side_by_side(make_scorer(teachers, num_workers=2), requests, names)
    for name, scores in zip(names, together, strict=True):
        alone = score(make_scorer(teachers), requests, name)
        assert all(np.array_equal(a, b) for a, b in zip(scores, alone, strict=True))
    assert not np.array_equal(together[0][5], together[1][5])


def test_scoring_leaves_the_event_loop_free(student: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    inner = embedded_scorer._score_pass

    def noted(*args: Any) -> list[np.ndarray]:
        seen.append(threading.current_thread().name)
        return inner(*args)

    monkeypatch.setattr(embedded_scorer, "_score_pass", noted)
    score(embedded_scorer.EmbeddedScorer({"t": student}), score_requests())
    assert seen
    assert threading.main_thread().name not in seen
