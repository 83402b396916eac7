"""Off-policy: the teachers answer the prompts that a run would draw, and a student learns those very tokens."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from small_run import Mopd

from examples.quickstart.world import CELLS
from megatron_mopd.config import load_config
from megatron_mopd.hf_folder import UMASK
from megatron_mopd.prompts.demonstrations import read_demonstrations
from megatron_mopd.store import TrajectoryStore
from megatron_mopd.teacher_samples import drawn_prompts
from megatron_mopd.trajectory_file import read_trajectories

STEPS = ("run.num_steps=2", "run.save_every_steps=2")


@pytest.fixture(scope="module")
def samples(mopd: Mopd, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("samples") / "run"
    result = mopd("sample-teachers", f"run.folder={run}", *STEPS)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [str(run / "samples" / f"{c.domain}-{c.effort}.safetensors") for c in CELLS]
    return run / "samples"


def test_each_teacher_answers_what_a_run_would_draw_of_its_cell(mopd: Mopd, samples: Path) -> None:
    drawn = Counter((p.id, p.cell) for p in drawn_prompts(load_config(mopd.config, STEPS)))
    assert drawn.total() == 2 * 36
    answered = Counter()
    for cell in CELLS:
        for sampled in read_trajectories(samples / f"{cell.domain}-{cell.effort}.safetensors"):
            prompt = sampled.trajectory.prompt
            assert prompt.prompt.cell == cell
            assert prompt.student_ids != prompt.teacher_ids, "the student will read the effort"
            answered[prompt.prompt.id, cell] += 1
    assert answered == drawn


def test_a_second_call_keeps_what_is_there_and_makes_what_is_not(mopd: Mopd, samples: Path) -> None:
    before = {file.name: file.read_bytes() for file in samples.iterdir()}
    assert {oct(file.stat().st_mode & 0o777) for file in samples.glob("*.safetensors")} == {oct(0o666 & ~UMASK)}
    times = {file.name: file.stat().st_mtime_ns for file in samples.glob("*.safetensors")}
    (samples / "agents-low.safetensors").unlink()
    assert mopd("sample-teachers", f"run.folder={samples.parent}", *STEPS, "telemetry.display=false").returncode == 0
    assert {file.name: file.read_bytes() for file in samples.iterdir()} == before
    again = {file.name: file.stat().st_mtime_ns for file in samples.glob("*.safetensors")}
    assert [name for name in times if again[name] != times[name]] == ["agents-low.safetensors"]
    refused = mopd("sample-teachers", f"run.folder={samples.parent}", *STEPS, "run.seed=5")
    assert refused.returncode == 2
    assert "was begun with another table 'run'" in refused.stderr.splitlines()[-1]


def test_a_student_learns_the_tokens_that_were_sampled(mopd: Mopd, samples: Path, tmp_path: Path) -> None:
    files = sorted(map(str, samples.glob("*.safetensors")))
    words = ["objective.name=sft", "teachers.models=[]", f"demonstrations.files={json.dumps(files)}"]
    result = mopd("train", f"run.folder={tmp_path}/run", *STEPS, *words)
    assert result.returncode == 0, result.stderr

    sampled = {s.trajectory.id: s.trajectory for f in files for s in read_trajectories(Path(f))}
    store = TrajectoryStore(tmp_path / "run")
    rows = [json.loads(line) for line in (store.folder(0) / "rows.jsonl").read_text().splitlines()]
    batch = store.read(0).select(range(len(rows)))
    for i, row in enumerate(rows):
        at = slice(batch.offsets[i], batch.offsets[i + 1])
        trajectory = sampled[row["id"]]
        prompt = list(trajectory.prompt.student_ids)
        assert batch.token_ids[at].tolist() == prompt + trajectory.response_ids.tolist()
        assert batch.loss_mask[at].tolist() == [False] * len(prompt) + trajectory.loss_mask.tolist()
    assert len({row["id"] for row in rows}) == 36


def test_a_cell_without_a_teacher_is_refused(mopd: Mopd, tmp_path: Path) -> None:
    result = mopd("sample-teachers", f"run.folder={tmp_path}/run", *STEPS, "teachers.models=[]")
    assert result.returncode == 2
    assert "no teacher for" in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_cut_file_is_refused(mopd: Mopd, samples: Path, tmp_path: Path) -> None:
    whole = (samples / "agents-max.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-9])
    words = ("objective.name=sft", "teachers.models=[]", f"demonstrations.files=[{tmp_path}/cut.safetensors]")
    result = mopd("preflight", "--static", f"run.folder={tmp_path}/run", *words)
    assert result.returncode == 2
    assert "cut.safetensors does not hold trajectories of this project" in result.stderr
    assert len({d.id for d in read_demonstrations(sorted(samples.glob("*.safetensors")))}) == 2 * 36
