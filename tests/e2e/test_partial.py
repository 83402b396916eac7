"""Partial rollouts in the whole loop: what is in flight outlives trainer and driver, to the bit."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from small_run import Mopd, assert_nothing_left, metrics, processes_of, wait_for_step

PARTIAL = ("rollout.partial.oversampling=1.5", "run.num_steps=6", "objective.ratio={mask_low: 0.5, mask_high: 2.0}")


@pytest.fixture(scope="module")
def whole(mopd: Mopd, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps without a disturbance."""
    run_folder = tmp_path_factory.mktemp("partial") / "run"
    result = mopd("train", f"run.folder={run_folder}", *PARTIAL)
    assert result.returncode == 0, result.stderr
    return run_folder


def rows(run_folder: Path) -> list[list[dict]]:
    files = sorted((run_folder / "trajectories").glob("step_*/rows.jsonl"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def test_a_run_says_what_it_interrupted_and_how_old_its_tokens_are(whole: Path) -> None:
    got = metrics(whole)
    assert [len(batch) for batch in rows(whole)] == [36] * 6
    ids = [row["id"] for batch in rows(whole) for row in batch]
    assert len(set(ids)) == len(ids)
    assert all(row["rollout/in_flight"] + row["rollout/surplus"] == 18 for row in got)
    for row in got:
        left = sum(row.get(f"rollout/interrupted_{why}", 0) for why in ("pause", "turn", "unstarted"))
        assert left == row["rollout/in_flight"]
    assert any(row.get("rollout/interrupted_pause", 0) > 0 for row in got)
    assert (got[0]["rollout/stale_share"], got[0]["rollout/oldest"]) == (0, 0)
    assert max(row["rollout/stale_share"] for row in got) > 0
    assert max(row["rollout/version_span"] for row in got) >= 1
    assert all(row["rollout/oldest"] <= 4 for row in got)
    assert all(row["train/mismatch_max"] < 1e-4 for row in got), "of tokens that the current weights sampled"
    assert any(row.get("train/drift_1", 0) > 0 for row in got)
    assert any(row["segments"] > 1 for batch in rows(whole) for row in batch)
    logs = list((whole / "trajectories").glob("in_flight_*.log"))
    assert 0 < len(logs) < 6, "the first are no longer needed"


@pytest.mark.parametrize("victim", ["everything", "driver"])
def test_a_killed_run_goes_on_with_what_was_in_flight(mopd: Mopd, whole: Path, tmp_path: Path, victim: str) -> None:
    """Save with some in flight, SIGKILL, restore."""
    run_folder = tmp_path / "run"
    process = mopd.start("train", f"run.folder={run_folder}", *PARTIAL)
    wait_for_step(process, run_folder, 3)
    if victim == "everything":
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
        assert_nothing_left(run_folder)
        process = mopd.start("train", f"run.folder={run_folder}", *PARTIAL)
    else:
        (driver,) = [pid for pid, words in processes_of(run_folder).items() if "megatron_mopd.driver" in words]
        os.kill(driver, signal.SIGKILL)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert rows(run_folder) == rows(whole)
    assert metrics(run_folder) == metrics(whole)
    for file in (whole / "student").glob("*.safetensors"):
        assert (run_folder / "student" / file.name).read_bytes() == file.read_bytes()


def test_an_environment_that_cannot_be_left_is_refused_before_anything_is_built(mopd: Mopd, tmp_path: Path) -> None:
    environment = "environments.sums.factory=tests.toy_environment:FirstHalf"
    result = mopd("train", f"run.folder={tmp_path / 'run'}", environment, *PARTIAL)
    assert result.returncode == 2
    assert "has no snapshot and restore (protocols.Resumable)" in result.stderr


def test_more_in_flight_than_the_bound_on_age_allows_is_refused(mopd: Mopd, tmp_path: Path) -> None:
    result = mopd("train", f"run.folder={tmp_path / 'run'}", *PARTIAL, "rollout.partial.max_staleness=0")
    assert result.returncode == 2
    assert "rollout.partial.oversampling=1.5 leaves prompts for 0.5 steps, and max_staleness=0" in result.stderr
