"""A trajectory that is written is the one that is read, and the store keeps what a step could not finish."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from megatron_mopd.config import Config
from megatron_mopd.driver import check_cells
from megatron_mopd.errors import UserError
from megatron_mopd.store import TrajectoryStore
from megatron_mopd.trajectory_file import Sampled, read_trajectories, write_trajectories
from megatron_mopd.types import Cell, Graded, Outcome, Prompt, RenderedPrompt, Segment, Trajectory


def trajectory(name: str = "0/p@3", with_routes: bool = True) -> Trajectory:
    message = {"role": "user", "content": "1 + 1 = ?", "tool_calls": [{"id": 3}]}
    prompt = Prompt("p", "general", "low", "sums", (message,), label={"answer": 2}, metadata={"tries": [1]})
    rng = np.random.default_rng(0)
    routes = [rng.integers(0, 8, (c, 2, 2)).astype(np.int16) if with_routes else None for c in (4, 4)]
    segments = (
        Segment((5, 6), (-0.1, float(np.float32(-1 / 3))), (True, True), 3, "abort", routes[0]),
        Segment.observation([7, 8], 3),
        Segment((9, 10), (-1e-9, -30.0), (True, True), 4, "stop", routes[1]),
    )
    return Trajectory(name, RenderedPrompt(prompt, (1, 2, 3), (1, 2)), segments, "stop", Outcome(1.0, 4, 12))


EMPTY = Trajectory("1/q@3", RenderedPrompt(Prompt("q", "general", "low", "sums", ()), (1,), (1,)), (), "length")


def test_reading_gives_what_was_written(tmp_path: Path) -> None:
    scores = np.array([-1, -2, -3, -4, -5, -6], np.float32)
    hidden = np.arange(12, dtype=np.uint16).reshape(6, 2)
    written = [
        Sampled(trajectory(), 3, scores, hidden),
        Sampled(EMPTY, 2),
        Sampled(trajectory("2/p@3", with_routes=False), 4),
        Sampled(EMPTY, 2, np.zeros(0, np.float32)),
    ]
    write_trajectories(tmp_path / "x", written)
    read = read_trajectories(tmp_path / "x")
    assert [r.trajectory for r in read] == [w.trajectory for w in written]
    assert [r.weight_version for r in read] == [3, 2, 4, 2]
    np.testing.assert_array_equal(read[0].teacher_logprobs, scores)
    np.testing.assert_array_equal(read[0].teacher_hidden, hidden)
    assert read[1].teacher_logprobs is None
    assert read[3].teacher_hidden is None
    assert read[3].teacher_logprobs is not None
    for r, w in zip(read, written, strict=True):
        for got, want in zip(r.trajectory.segments, w.trajectory.segments, strict=True):
            assert (got.routed_experts is None) == (want.routed_experts is None)
            if want.routed_experts is not None:
                np.testing.assert_array_equal(got.routed_experts, want.routed_experts)


def test_nothing_is_a_file_too(tmp_path: Path) -> None:
    write_trajectories(tmp_path / "x", [])
    assert read_trajectories(tmp_path / "x") == []


@pytest.mark.parametrize(
    "change", [lambda whole: whole[:-1], lambda whole: whole[:300], lambda _: b"{}", lambda _: b""]
)
def test_a_file_that_was_cut_or_is_another_is_refused(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    store = TrajectoryStore(tmp_path)
    store.keep(3, [Sampled(trajectory(), 3)])
    file = tmp_path / "trajectories" / "step_00000003.sampled"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(UserError, match=rf"{file} does not hold trajectories of this project: .*; put the file back"):
        store.kept(3)


def test_a_file_of_tensors_alone_is_refused(tmp_path: Path) -> None:
    save_file({"token_ids": np.zeros(3, np.int32)}, tmp_path / "x")
    with pytest.raises(UserError, match="does not hold trajectories of this project"):
        read_trajectories(tmp_path / "x")


@pytest.mark.parametrize("cells", [{"mixture": {"agents": 1.0}}, {"efforts": {"high": 1.0}}])
def test_what_waits_for_a_teacher_that_was_removed_is_named(tmp_path: Path, cells: dict[str, Any]) -> None:
    config = Config.model_validate(
        {
            "run": {"folder": tmp_path, "num_steps": 1},
            "student": {"checkpoint": "sft"},
            "prompts": {"files": [], "batch_size": 1, "mixture": {"general": 1.0}},
            "environments": {},
            "rollout": {"max_response_tokens": 5},
        }
    )
    check_cells([trajectory()], config)
    removed = config.model_copy(update={"prompts": config.prompts.model_copy(update=cells)})
    with pytest.raises(
        UserError, match=rf"trajectory 0/p@3 in {tmp_path}/trajectories waits .* teacher of general/low"
    ):
        check_cells([trajectory()], removed)


def test_a_step_names_what_it_was_written_without(tmp_path: Path) -> None:
    store, done = TrajectoryStore(tmp_path), trajectory()
    graded = Graded(done, "t", np.zeros(6, np.float32))
    store.write(3, [graded], [Cell("general", "low")], {}, unscored=[Sampled(EMPTY, 3)])
    assert [s.trajectory for s in store.unscored(3)] == [EMPTY]
    assert store.unscored(2) == []
    assert len(store.read(3)) == 1


def test_what_was_sampled_for_a_step_is_kept_until_the_step_is_there(tmp_path: Path) -> None:
    store, done = TrajectoryStore(tmp_path), trajectory()
    for step in (3, 4, 5):
        store.keep(step, [Sampled(replace(done, id=str(step)), step)])
    store.cut(4)  # its own weights sampled it; later ones are of weights that are gone
    assert [[s.trajectory.id for s in store.kept(step)] for step in (3, 4, 5)] == [["3"], ["4"], []]
    store.write(4, [Graded(done, "t", np.zeros(6, np.float32))], [Cell("general", "low")], {})
    assert store.kept(4) == []
