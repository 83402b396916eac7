"""What every teacher scorer promises (protocols.TeacherScorer)."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_engine import MakeEngine, generate, prompts, reference_logprobs
from tiny import VOCAB_SIZE, write_checkpoint

from megatron_mopd.embedded import scorer as embedded_scorer
from megatron_mopd.errors import UserError
from megatron_mopd.protocols import SampleRequest, ScoreRequest, TeacherScorer

MakeScorer = Callable[..., TeacherScorer]


def score(scorer: TeacherScorer, requests: Sequence[ScoreRequest], teacher: str = "t") -> list[np.ndarray]:
    async def body() -> list[np.ndarray]:
        try:
            return await scorer.score(teacher, requests)
        finally:
            await scorer.close()

    return asyncio.run(body())


def score_requests(count: int = 12) -> list[ScoreRequest]:
    """Responses of lengths 0, 1, 2, ... after prompts of lengths 1 to 9, with the last vocabulary id in each."""
    rng = np.random.default_rng(3)
    responses = [(*rng.integers(0, VOCAB_SIZE, max(i - 1, 0)).tolist(), VOCAB_SIZE - 1)[:i] for i in range(count)]
    return [ScoreRequest(f"t{i}", p, tuple(r)) for i, (p, r) in enumerate(zip(prompts(count), responses, strict=True))]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_one_tempered_logprob_per_response_token(make_scorer: MakeScorer, student: Path, temperature: float) -> None:
    requests = score_requests()
    scores = score(make_scorer({"t": student}, temperature=temperature), requests)
    assert [len(s) for s in scores] == [len(r.response_ids) for r in requests]
    assert len(scores[0]) == 0
    for request, got in zip(requests, scores, strict=True):
        want = reference_logprobs(student, request.prompt_ids + request.response_ids, temperature)
        np.testing.assert_allclose(got, want[len(request.prompt_ids) - 1 :], atol=1e-5)
        assert got.dtype == np.float32


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_student_that_is_its_own_teacher_earns_nothing(
    make_engine: MakeEngine, make_scorer: MakeScorer, student: Path, temperature: float
) -> None:
    """Law 3 on this side: |r| < 1e-4 for every sampled token."""
    asked = [SampleRequest(f"{i}", ids, 1 + i % 20, ()) for i, ids in enumerate(prompts(60))]
    segments = generate(make_engine(temperature=temperature), asked)
    requests = [ScoreRequest(r.trajectory_id, r.token_ids, s.token_ids) for r, s in zip(asked, segments, strict=True)]
    scores = score(make_scorer({"t": student}, temperature=temperature), requests)
    r = np.concatenate([t - np.array(s.logprobs, np.float32) for t, s in zip(scores, segments, strict=True)])
    assert np.abs(r).max() < 1e-4


def test_padding_that_equals_a_real_token_changes_nothing(
    make_scorer: MakeScorer, student: Path, tmp_path: Path
) -> None:
    """Pad = end = 0, a prompt with 0 in it and a response that ends with it."""
    folder = tmp_path / "padded"
    write_checkpoint(folder, seed=0, pad_token_id=0, eos_token_id=0)
    requests = [ScoreRequest("a", (5, 0, 6), (7, 8, 0)), ScoreRequest("b", tuple(range(40)), (0, 0))]
    for request, got in zip(requests, score(make_scorer({"t": folder}), requests), strict=True):
        want = reference_logprobs(folder, request.prompt_ids + request.response_ids, 1.0)
        np.testing.assert_allclose(got, want[len(request.prompt_ids) - 1 :], atol=1e-5)


def test_all_empty_responses_need_no_forward_pass(make_scorer: MakeScorer, student: Path) -> None:
    assert [len(s) for s in score(make_scorer({"t": student}), [ScoreRequest("a", (1,), ())] * 2)] == [0, 0]
    assert score(make_scorer({"t": student}), []) == []


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
    requests = score_requests(30)

    async def side_by_side() -> list[list[np.ndarray]]:
        scorer = make_scorer(teachers, num_workers=2)
        try:
            return await asyncio.gather(*[scorer.score(name, requests) for name in ("one", "two", "one", "two")])
        finally:
            await scorer.close()

    together = asyncio.run(side_by_side())
    for name, scores in zip(("one", "two", "one", "two"), together, strict=True):
        alone = score(make_scorer(teachers), requests, name)
        assert all(np.array_equal(a, b) for a, b in zip(scores, alone, strict=True))
    assert not np.array_equal(together[0][5], together[1][5])


def test_scoring_leaves_the_event_loop_free(make_scorer: MakeScorer, student: Path) -> None:
    seen: list[str] = []
    scorer = make_scorer({"t": student})
    inner = scorer._score  # type: ignore[attr-defined]
    scorer._score = lambda *args: (seen.append(threading.current_thread().name), inner(*args))[1]  # type: ignore[attr-defined]
    score(scorer, score_requests())
    assert seen
    assert threading.main_thread().name not in seen


def test_a_teacher_that_gives_nan_is_named_with_the_trajectory(
    make_scorer: MakeScorer, student: Path, tmp_path: Path
) -> None:
    shutil.copytree(student, tmp_path / "sick")
    tensors = load_file(tmp_path / "sick/model.safetensors")
    tensors["model.embed_tokens.weight"][17] = torch.nan
    save_file(tensors, tmp_path / "sick/model.safetensors", metadata={"format": "pt"})
    scorer = make_scorer({"sick": tmp_path / "sick"})
    requests = [ScoreRequest("well", (1, 2), (3, 4)), ScoreRequest("ill", (1, 17), (3, 4))]
    with pytest.raises(UserError, match="teacher sick gives non-finite log-probs for trajectory ill"):
        score(scorer, requests, "sick")


def test_an_unknown_teacher_and_an_empty_prompt_are_refused(make_scorer: MakeScorer, student: Path) -> None:
    with pytest.raises(UserError, match="no teacher named law; known: t"):
        score(make_scorer({"t": student}), score_requests(), "law")
    with pytest.raises(ValueError, match="a: an empty prompt"):
        score(make_scorer({"t": student}), [ScoreRequest("a", (), (1,))])
