"""The same-origin gate: the mean is over trained tokens, its interval over trajectories, and the gate is held."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from megatron_mopd.config import Config
from megatron_mopd.errors import UserError
from megatron_mopd.teachers.origin import check_late, check_origin, measure, outliers
from megatron_mopd.types import Graded, Prompt, RenderedPrompt, Segment, Trajectory


def graded(teacher, differences, observed=0, name="t", weight_version=0):
    """A trajectory whose student is above its teacher by `differences`, then tokens that nobody sampled."""
    n = len(differences)
    prompt = RenderedPrompt(Prompt("p", "law", "low", "e", ()), (1,), (1,))
    segments = (Segment((1,) * n, (-1.0,) * n, (True,) * n, weight_version), Segment.observation([2] * observed))
    scores = np.concatenate([-1.0 - np.asarray(differences), np.full(observed, -99.0)])
    return Graded(Trajectory(name, prompt, segments, "stop"), teacher, scores.astype(np.float32))


def config(gate=0.15, names=("a",), other_origin=()):
    models = [{"name": n, "domain": "law", "effort": n, "checkpoint": Path("x")} for n in names]
    return Config.model_validate(
        {
            "run": {"folder": "run", "num_steps": 1},
            "student": {"checkpoint": "sft"},
            "teachers": {"max_initial_kl": gate, "other_origin": other_origin, "models": models},
            "prompts": {"files": ["p"], "batch_size": 1, "mixture": {"law": 1}, "efforts": dict.fromkeys(names, 1.0)},
            "environments": {},
            "rollout": {"max_response_tokens": 5},
        }
    )


def test_the_mean_is_over_the_trained_tokens_of_all_trajectories():
    (kl,) = measure([graded("a", [0.2, 0.4], observed=3), graded("a", [0.0], observed=1)])
    assert kl.mean == pytest.approx(0.2)
    assert (kl.num_trajectories, kl.num_tokens) == (2, 3)


def test_tokens_of_one_trajectory_do_not_count_as_independent():
    rng = np.random.default_rng(0)
    levels = rng.normal(0.5, 0.2, 200)
    short = measure([graded("a", [level] * 2) for level in levels])[0]
    long = measure([graded("a", [level] * 50) for level in levels])[0]
    assert (
        long.margin
        == pytest.approx(short.margin)
        == pytest.approx(1.972 * levels.std(ddof=1) / math.sqrt(200), rel=1e-3)
    )


@pytest.mark.parametrize("num_trajectories", [2, 5, 16])
def test_the_interval_holds_the_true_mean_as_often_as_it_says(num_trajectories):
    """Trajectories of random length whose tokens share a level; longer ones are further away."""
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(600):
        lengths = rng.integers(1, 9, num_trajectories)
        levels = rng.normal(0.1 * lengths, 0.2)
        rows = [graded("a", level + rng.normal(0, 0.3, n)) for n, level in zip(lengths, levels, strict=True)]
        (kl,) = measure(rows)
        true_mean = 0.1 * np.mean(np.arange(1, 9) ** 2) / np.mean(np.arange(1, 9))
        hits += abs(kl.mean - true_mean) <= kl.margin
    assert 0.92 <= hits / 600 <= 0.98


def test_a_teacher_above_the_gate_is_refused_with_what_was_measured():
    rows = [graded("a", [0.1]), graded("a", [0.1]), graded("b", [0.1, 0.3]), graded("b", [0.4, 0.2])]
    table = check_origin(rows, config(gate=0.25001, names=("a", "b")))
    assert re.search(r"  a +0.100 ± 0.000  2 tokens of 2 trajectories", table)
    with pytest.raises(UserError, match=r"max_initial_kl=0.15: teacher b 0.250 ± 0.635; .*trained from student.check"):
        check_origin(rows, config(names=("a", "b")))


def test_a_teacher_above_the_gate_is_allowed_by_its_name_alone():
    rows = [graded("a", [0.1]), graded("b", [0.4, 0.2]), graded("c", [0.9])]
    known = config(gate=0.15, names=("a", "b", "c"), other_origin=("c",))
    with pytest.raises(UserError, match=r"teacher b 0.300 ± \?; .*or name them in teachers.other_origin"):
        check_origin(rows, known)
    table = check_origin(rows, config(gate=0.15, names=("a", "b", "c"), other_origin=("b", "c")))
    assert re.search(r"  c +0.900 .* above the gate, allowed by teachers.other_origin", table)
    assert "allowed" not in table.splitlines()[1]
    check_late(rows, config(gate=0.15, other_origin=("b", "c")))


def test_a_teacher_equal_to_the_student_passes_any_gate():
    assert "0.000 ± 0.000" in check_origin([graded("a", [0.0] * 3)] * 2, config(gate=1e-9))


def test_a_teacher_that_was_not_measured_is_said():
    table = check_origin([graded("a", [0.1]), graded("b", [], observed=2)], config(names=("a", "b")))
    assert "0.100 ± ?" in table
    assert "warning: teacher b has scored nothing and was not measured" in table


def test_a_teacher_that_scores_the_first_batch_late_is_held_to_the_gate():
    rows = [graded("a", [0.1]), graded("b", [0.9], weight_version=1), graded("c", [])]
    check_late(rows, config())
    with pytest.raises(UserError, match=r"max_initial_kl=0.15: teacher b 0.900 ± \?;"):
        check_late([*rows, graded("b", [0.9])], config())


@pytest.mark.parametrize("odd", [0.0, 0.5])
def test_an_outlier_among_the_teachers_is_flagged(odd):
    rng = np.random.default_rng(2)
    levels = {"a": 0.1, "b": 0.11, "c": 0.09, "d": 0.1, "e": odd}
    rows = [graded(name, rng.normal(level, 0.01, 5)) for name, level in levels.items() for _ in range(16)]
    assert [kl.teacher for kl, _ in outliers(measure(rows))] == ["e"]
    assert "warning: teacher e is unlike the others" in check_origin(rows, config(gate=1.0, names=tuple(levels)))
    assert outliers(measure([g for g in rows if g.teacher != "a"])) == []  # too few to say


def test_what_is_within_its_own_interval_is_no_outlier():
    def outlying(noise_of_e):
        levels = {
            "a": (0.1, 0.001),
            "b": (0.102, 0.001),
            "c": (0.098, 0.001),
            "d": (0.1, 0.001),
            "e": (0.2, noise_of_e),
        }
        rows = [graded(n, [level + sign * noise]) for n, (level, noise) in levels.items() for sign in (-1, 1) * 8]
        return [kl.teacher for kl, _ in outliers(measure(rows))]

    assert outlying(0.001) == ["e"]
    assert outlying(0.3) == []
