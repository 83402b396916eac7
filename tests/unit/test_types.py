"""The types that flow round the loop: lengths checked on construction, columns aligned with their tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mopd.batch import TOKEN_COLUMNS, Batch
from megatron_mopd.types import Cell, Graded, Outcome, Prompt, RenderedPrompt, Segment, Trajectory

CELLS = (Cell("law", "low"), Cell("law", "high"))
QUICK = settings(max_examples=60)


def graded(
    segments: tuple[Segment, ...],
    teacher_logprobs: list[float],
    prompt: tuple[int, ...] = (1, 2),
    cell: Cell = CELLS[0],
) -> Graded:
    rendered = RenderedPrompt(Prompt("p", cell.domain, cell.effort, "law", ()), prompt, (*prompt, 9))
    trajectory = Trajectory("p@0", rendered, segments, "stop")
    return Graded(trajectory, "law", np.array(teacher_logprobs, np.float32))


SAMPLED = Segment((5, 6), (-0.5, -0.25), (True, True), weight_version=3)
OBSERVED = Segment.observation([7])


@pytest.mark.parametrize(("logprobs", "mask"), [((0.0,), (True, True)), ((0.0, 0.0), (True,))])
def test_segment_rejects_unequal_lengths(logprobs: tuple[float, ...], mask: tuple[bool, ...]) -> None:
    with pytest.raises(ValueError, match="segment has 2 token ids"):
        Segment((5, 6), logprobs, mask, 0)


def test_graded_rejects_a_score_too_few_or_too_many() -> None:
    with pytest.raises(ValueError, match=r"teacher law returned 2 log-probs for the 3 response tokens of p@0"):
        graded((SAMPLED, OBSERVED), [-1.0, -2.0])
    with pytest.raises(ValueError, match="returned 4 log-probs for the 3"):
        graded((SAMPLED, OBSERVED), [-1.0, -2.0, -3.0, -4.0])


def test_a_batch_rejects_an_advantage_too_few() -> None:
    with pytest.raises(ValueError, match="batch has 1 rows and 2 outcome advantages"):
        Batch.from_graded([graded((SAMPLED,), [-1.0, -2.0])], CELLS, np.zeros(2, np.float32))


def test_columns_are_aligned_with_their_tokens() -> None:
    later = replace(SAMPLED, token_ids=(8, 4), logprobs=(-0.125, -4.0), weight_version=4)
    batch = Batch.from_graded(
        [graded((SAMPLED, OBSERVED, later), [-1.0, -2.0, -3.0, -4.0, -5.0], cell=CELLS[1])], CELLS
    )
    assert batch.token_ids.tolist() == [1, 2, 5, 6, 7, 8, 4], "the student's prompt, not the teacher's"
    assert batch.loss_mask.tolist() == [False, False, True, True, False, True, True]
    assert batch.rollout_logprobs.tolist() == [0, 0, -0.5, -0.25, 0, -0.125, -4.0]
    assert batch.teacher_logprobs.tolist() == [0, 0, -1, -2, 0, -4, -5], "an observation carries no score"
    assert batch.weight_version.tolist() == [0, 0, 3, 3, 0, 4, 4]
    assert batch.cell.tolist() == [1]
    assert batch.loss_tokens.tolist() == [4]


def test_non_finite_score_of_an_observation_does_not_reach_the_batch() -> None:
    batch = Batch.from_graded([graded((SAMPLED, OBSERVED), [-1.0, -2.0, -np.inf])], CELLS)
    assert np.isfinite(batch.teacher_logprobs).all()


def test_trajectory_of_an_unknown_cell_is_refused() -> None:
    with pytest.raises(ValueError, match=r"p@0 is of tax/low, which is not a cell of this batch"):
        Batch.from_graded([graded((SAMPLED,), [-1.0, -2.0], cell=Cell("tax", "low"))], CELLS)


def test_no_trajectories_make_an_empty_batch() -> None:
    batch = Batch.from_graded([], CELLS)
    assert len(batch) == 0
    for name, dtype in TOKEN_COLUMNS.items():
        assert getattr(batch, name).dtype == dtype
    assert len(batch.select([])) == 0


def test_first_token_of_a_row_never_counts_as_trained() -> None:
    """It has no context to be predicted from."""
    batch = Batch.from_graded([graded((SAMPLED,), [-1.0, -2.0], prompt=()), graded((), [], prompt=())], CELLS)
    assert batch.loss_tokens.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"cell": np.zeros(2, np.int32)}, "1 rows and 2 cell indices"),
        ({"loss_mask": np.zeros(3, bool)}, "column loss_mask has 3 entries for 4 tokens"),
        ({"offsets": np.array([1, 4])}, "offsets must start at 0"),
        ({"offsets": np.array([0, 5, 4]), "cell": np.zeros(2, np.int32)}, "offsets must start at 0 and never fall"),
    ],
)
def test_batch_rejects_columns_that_do_not_fit(change: dict, reason: str) -> None:
    batch = Batch.from_graded([graded((SAMPLED,), [-1.0, -2.0])], CELLS)
    with pytest.raises(ValueError, match=reason):
        replace(batch, **change)


def test_reward_counts_only_within_the_budget() -> None:
    assert Outcome(1.0, spent_tokens=4, budget_tokens=4).reward_within_budget == 1.0
    assert Outcome(1.0, spent_tokens=5, budget_tokens=4).reward_within_budget == 0.0


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    tokens = draw(st.lists(st.integers(0, 47), max_size=5))
    if draw(st.booleans()):
        return Segment.observation(tokens)
    logprobs = draw(st.lists(st.floats(-20, 0, width=32), min_size=len(tokens), max_size=len(tokens)))
    return Segment(tuple(tokens), tuple(logprobs), (True,) * len(tokens), draw(st.integers(0, 3)))


@st.composite
def rows(draw: st.DrawFn) -> Graded:
    parts = tuple(draw(st.lists(segments(), max_size=4)))
    size = sum(len(s.token_ids) for s in parts)
    scores = draw(st.lists(st.floats(-20, 0, width=32), min_size=size, max_size=size))
    return graded(parts, scores, tuple(draw(st.lists(st.integers(0, 47), max_size=3))), draw(st.sampled_from(CELLS)))


@QUICK
@given(st.lists(rows(), max_size=6), st.data())
def test_selecting_rows_gives_the_batch_of_those_trajectories(trajectories: list[Graded], data: st.DataObject) -> None:
    batch = Batch.from_graded(trajectories, CELLS)
    index = st.integers(0, max(0, len(trajectories) - 1))
    picked = data.draw(st.lists(index, max_size=8 if trajectories else 0))
    selected, expected = batch.select(picked), Batch.from_graded([trajectories[i] for i in picked], CELLS)
    for name in (*TOKEN_COLUMNS, "offsets", "cell"):
        np.testing.assert_array_equal(getattr(selected, name), getattr(expected, name), err_msg=name, strict=True)


@QUICK
@given(st.lists(rows(), max_size=6))
def test_a_batch_holds_every_token_of_every_trajectory_once(trajectories: list[Graded]) -> None:
    batch = Batch.from_graded(trajectories, CELLS)
    for i, row in enumerate(trajectories):
        start, end = batch.offsets[i], batch.offsets[i + 1]
        before = start + len(row.trajectory.prompt.student_ids)
        np.testing.assert_array_equal(batch.token_ids[start:before], row.trajectory.prompt.student_ids)
        np.testing.assert_array_equal(batch.token_ids[before:end], row.trajectory.response_ids)
        np.testing.assert_array_equal(batch.rollout_logprobs[before:end], row.trajectory.rollout_logprobs)
        assert not batch.loss_mask[start:before].any()
        assert batch.loss_tokens[i] == batch.loss_mask[start + 1 : end].sum()


def test_hidden_states_stay_with_their_tokens() -> None:
    """Observations drop theirs, as they drop their scores; an empty response has none to tell the kind of."""
    first = graded((SAMPLED, OBSERVED), [-1.0, -2.0, -3.0])
    hidden = np.array([[1, 2], [3, 4], [5, 6]], np.uint16)
    empty = replace(graded((), []), teacher_hidden=np.zeros((0, 2), np.float32))
    batch = Batch.from_graded([empty, replace(first, teacher_hidden=hidden)], CELLS)
    assert batch.teacher_hidden is not None
    assert batch.teacher_hidden.dtype == np.uint16
    assert batch.teacher_hidden.tolist() == [[0, 0]] * 4 + [[1, 2], [3, 4], [0, 0]]
    assert batch.select([1]).token_columns["teacher_hidden"].tolist() == batch.teacher_hidden[2:].tolist()
    assert Batch.from_graded([empty, first], CELLS).teacher_hidden is None


def test_hidden_states_of_some_trajectories_or_of_other_kinds_are_refused() -> None:
    bare = graded((SAMPLED,), [-1.0, -2.0])
    with_hidden = replace(bare, teacher_hidden=np.zeros((2, 3), np.float32))
    with pytest.raises(ValueError, match="1 of 2 trajectories have"):
        Batch.from_graded([bare, with_hidden], CELLS)
    with pytest.raises(ValueError, match="uint16"):
        Batch.from_graded([with_hidden, replace(bare, teacher_hidden=np.zeros((2, 3), np.uint16))], CELLS)
    with pytest.raises(ValueError, match="returned 3 hidden states for the 2 response tokens"):
        replace(bare, teacher_hidden=np.zeros((3, 3), np.float32))
