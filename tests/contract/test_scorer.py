"""What every teacher scorer promises (protocols.TeacherScorer): the embedded one here, SGLang's in tests/sglang.

Scores are compared to 1e-5: only the embedded scorer can promise the same bits again (test_embedded_scorer.py).
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from contract.test_engine import MakeEngine, generate, prompts, reference_logprobs
from safetensors.torch import load_file, save_file
from tiny import VOCAB_SIZE

from megatron_mopd.errors import UserError
from megatron_mopd.protocols import EndpointDown, SampleRequest, ScoreRequest, TeacherScorer

MakeScorer = Callable[..., TeacherScorer]


def score(scorer: TeacherScorer, requests: Sequence[ScoreRequest], teacher: str = "t") -> list[np.ndarray]:
    return score_side_by_side(scorer, requests, [teacher])[0]


def score_side_by_side(
    scorer: TeacherScorer, requests: Sequence[ScoreRequest], teachers: Sequence[str]
) -> list[list[np.ndarray]]:
    async def body() -> list[list[np.ndarray]]:
        try:
            for name in teachers:
                await scorer.prepare(name)
            return await asyncio.gather(*[scorer.score(name, requests) for name in teachers])
        finally:
            await scorer.close()

    return asyncio.run(body())


def score_requests(count: int = 12) -> list[ScoreRequest]:
    """Responses of lengths 0, 1, 2, ... after prompts of lengths 1 to 9, with the last vocabulary id in each."""
    rng = np.random.default_rng(3)
    responses = [(*rng.integers(0, VOCAB_SIZE, max(i - 1, 0)).tolist(), VOCAB_SIZE - 1)[:i] for i in range(count)]
    return [ScoreRequest(f"t{i}", p, tuple(r)) for i, (p, r) in enumerate(zip(prompts(count), responses, strict=True))]


def assert_scores(
    scores: Sequence[np.ndarray], requests: Sequence[ScoreRequest], folder: Path, temperature: float = 1.0
) -> None:
    """One tempered log-prob per response token, as transformers computes it."""
    assert [len(s) for s in scores] == [len(r.response_ids) for r in requests]
    for request, got in zip(requests, scores, strict=True):
        want = reference_logprobs(folder, request.prompt_ids + request.response_ids, temperature)
        np.testing.assert_allclose(got, want[len(request.prompt_ids) - 1 :], atol=1e-5)
        assert got.dtype == np.float32


def assert_own_teacher_earns_nothing(
    make_engine: MakeEngine, make_scorer: MakeScorer, checkpoint: Path, temperature: float
) -> None:
    """Law 3 on this side: |r| < 1e-4 for every sampled token."""
    asked = [SampleRequest(f"{i}", ids, 1 + i % 20, ()) for i, ids in enumerate(prompts(60))]
    segments = generate(make_engine(temperature=temperature), asked)
    requests = [ScoreRequest(r.trajectory_id, r.token_ids, s.token_ids) for r, s in zip(asked, segments, strict=True)]
    scores = score(make_scorer({"t": checkpoint}, temperature=temperature), requests)
    r = np.concatenate([t - np.array(s.logprobs, np.float32) for t, s in zip(scores, segments, strict=True)])
    assert np.abs(r).max() < 1e-4


def test_one_logprob_per_response_token(make_scorer: MakeScorer, checkpoint: Path) -> None:
    requests = score_requests()
    assert_scores(score(make_scorer({"t": checkpoint}), requests), requests, checkpoint)


def test_a_student_that_is_its_own_teacher_earns_nothing(
    make_engine: MakeEngine, make_scorer: MakeScorer, checkpoint: Path
) -> None:
    assert_own_teacher_earns_nothing(make_engine, make_scorer, checkpoint, 1.0)


def test_padding_that_equals_a_real_token_changes_nothing(
    make_scorer: MakeScorer, checkpoint: Path, tmp_path: Path
) -> None:
    """Pad = end = 0, a prompt with 0 in it and a response that ends with it."""
    folder = shutil.copytree(checkpoint, tmp_path / "padded")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": 0, "eos_token_id": 0}))
    requests = [ScoreRequest("a", (5, 0, 6), (7, 8, 0)), ScoreRequest("b", tuple(range(40)), (0, 0))]
    assert_scores(score(make_scorer({"t": folder}), requests), requests, folder)


def test_all_empty_responses_need_no_forward_pass(make_scorer: MakeScorer, checkpoint: Path) -> None:
    assert [len(s) for s in score(make_scorer({"t": checkpoint}), [ScoreRequest("a", (1,), ())] * 2)] == [0, 0]
    assert score(make_scorer({"t": checkpoint}), []) == []


def test_teachers_side_by_side_score_as_alone(make_scorer: MakeScorer, checkpoint: Path, update: Path) -> None:
    requests, names = score_requests(30), ("one", "two", "one", "two")
    folders = {"one": checkpoint, "two": update}
    together = score_side_by_side(make_scorer(folders), requests, names)
    for name, scores in zip(names, together, strict=True):
        assert_scores(scores, requests, folders[name])
    assert np.abs(together[0][5] - together[1][5]).max() > 0.01


def test_a_teacher_that_gives_nan_is_named_with_the_trajectory(
    make_scorer: MakeScorer, checkpoint: Path, tmp_path: Path
) -> None:
    shutil.copytree(checkpoint, tmp_path / "sick")
    tensors = load_file(tmp_path / "sick/model.safetensors")
    tensors["model.embed_tokens.weight"][17] = torch.nan
    save_file(tensors, tmp_path / "sick/model.safetensors", metadata={"format": "pt"})
    scorer = make_scorer({"sick": tmp_path / "sick"})
    requests = [ScoreRequest("well", (1, 2), (3, 4)), ScoreRequest("ill", (1, 17), (3, 4))]
    with pytest.raises((UserError, EndpointDown), match="non-finite log-probs for trajectory ill"):
        score(scorer, requests, "sick")


def test_an_unknown_teacher_and_an_empty_prompt_are_refused(make_scorer: MakeScorer, checkpoint: Path) -> None:
    with pytest.raises(UserError, match="no teacher named law; known: t"):
        score(make_scorer({"t": checkpoint}), score_requests(), "law")
    with pytest.raises(ValueError, match="a: an empty prompt"):
        score(make_scorer({"t": checkpoint}), [ScoreRequest("a", (), (1,))])
