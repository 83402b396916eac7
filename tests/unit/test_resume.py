"""Resuming: what cannot be continued is refused before a model is built, and what has changed is said."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from megatron_mopd.config import load_config
from megatron_mopd.errors import UserError
from megatron_mopd.mcore.layout import Layout
from megatron_mopd.resume import check_resume, facts, latest, read_facts, teacher_facts, write_facts
from megatron_mopd.teachers.identity import fingerprint


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(
        f"run: {{folder: {tmp_path / 'run'}, num_steps: 3}}\n"
        "student: {checkpoint: student}\n"
        "prompts: {files: [a.jsonl], batch_size: 4, mixture: {law: 1}}\n"
        "environments: {}\n"
        "rollout: {max_response_tokens: 5}\n"
    )
    return lambda *overrides: load_config([file], overrides)


@pytest.fixture
def checkpoint(config, tmp_path):
    """Step 2 of a run of two processes."""
    folder = tmp_path / "run" / "checkpoints" / "step_00000002"
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(b"weights")
    write_facts(folder, {**facts(2, Layout(), processes=2, distributed_optimizer=True), "teachers": {}})
    (folder.parent / "latest").write_text("step_00000002\n")
    (tmp_path / "run" / "config.yaml").write_text(config().dump())
    return folder


def test_a_new_run_continues_nothing(config):
    assert check_resume(config(), world_size=2) == ""


def test_the_same_command_continues_and_changes_are_said(config, checkpoint):
    assert check_resume(config(), 2) == f"continues {checkpoint}"
    said = check_resume(config("run.num_steps=9", "megatron.lr=1.0"), 2)
    assert said == f"continues {checkpoint} with run.num_steps=9 (was 3), megatron.lr=1.0 (was None)"


@pytest.mark.parametrize(
    ("world_size", "override", "reason"),
    [
        (4, "run.seed=0", "processes 2 and this run has 4"),
        (2, "megatron.tensor_model_parallel_size=2", "with layout"),
        (2, "megatron.use_distributed_optimizer=false", "optimizer distributed and this run has plain"),
        (2, "student.checkpoint=other", r"student.checkpoint='other' \(was 'student'\); choose another run.folder"),
    ],
)
def test_another_run_in_the_folder_is_refused(config, checkpoint, world_size, override, reason):
    with pytest.raises(UserError, match=reason):
        check_resume(config(override), world_size)


@pytest.fixture
def trained(tmp_path, config):
    """Called with a teacher's folder: the same run at step 2 with it, and its configuration."""

    def save(folder, saved_teachers=None):
        now = config(f"teachers.models=[{{name: law-low, domain: law, effort: low, checkpoint: {folder}}}]")
        checkpoint = tmp_path / "run" / "checkpoints" / "step_00000002"
        checkpoint.mkdir(parents=True, exist_ok=True)
        teacher_facts.cache_clear()  # as in another process
        of_teachers = {"teachers": teacher_facts(now.teachers.models)} if saved_teachers is None else saved_teachers
        write_facts(checkpoint, {**facts(2, Layout(), 2, True), **of_teachers})
        (checkpoint.parent / "latest").write_text(checkpoint.name)
        (tmp_path / "run" / "config.yaml").write_text(now.dump())
        teacher_facts.cache_clear()
        return now

    return save


def write_teacher(folder, weights=0.0, tokenizer="a", template="", architecture="X"):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], "vocab_size": 1}))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {tokenizer: 0}}}))
    (folder / "chat_template.jinja").write_text(template)
    save_file({"w": np.full(3, weights, np.float32)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("change", [{"weights": 1.0}, {"tokenizer": "b"}, {"template": "x"}, {"architecture": "Y"}])
def test_another_teacher_under_the_name_of_one_in_the_checkpoint_is_refused(trained, tmp_path, change):
    teacher, (part,) = write_teacher(tmp_path / "teacher"), change
    now, before = trained(teacher), getattr(fingerprint(teacher), part)[:16]
    assert "\n" not in check_resume(now, 2)
    after = getattr(fingerprint(write_teacher(teacher, **change)), part)[:16]
    teacher_facts.cache_clear()
    with pytest.raises(
        UserError, match=f"teacher law-low of {part} {before} and {teacher} now has {after}; put the old"
    ):
        check_resume(now, 2)


def test_a_teacher_of_a_new_name_may_come_and_is_said(trained, config, tmp_path):
    trained(write_teacher(tmp_path / "old"))
    new = write_teacher(tmp_path / "new", 1.0)
    now = config(f"teachers.models=[{{name: new, domain: law, effort: low, checkpoint: {new}}}]")
    assert " with teachers.models=[{" in check_resume(now, 2)


def test_a_checkpoint_that_does_not_know_its_teachers_is_continued_and_this_is_said(trained, tmp_path):
    now = trained(write_teacher(tmp_path / "teacher"), saved_teachers={})
    assert "step_00000002 does not say who its teachers were: they are taken to be" in check_resume(now, 2)


def test_a_file_that_was_cut_or_lost_is_refused(checkpoint):
    (checkpoint / "__0_0.distcp").write_bytes(b"weight")
    with pytest.raises(UserError, match=r"__0_0.distcp is not as it was written \(7 bytes\); name an older"):
        read_facts(checkpoint)
    (checkpoint / "__0_0.distcp").unlink()
    with pytest.raises(UserError, match="is not as it was written"):
        read_facts(checkpoint)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", json.dumps({"step": 1, "files": {}})])
def test_facts_that_are_something_else_are_refused(checkpoint, content):
    (checkpoint / "learner.json").write_text(content)
    with pytest.raises(UserError, match="is not a checkpoint of this project"):
        read_facts(checkpoint)


@pytest.mark.parametrize("name", ["", "\n", "step_00000009", "../nowhere"])
def test_a_tracker_that_names_no_checkpoint_is_refused(checkpoint, name):
    (checkpoint.parent / "latest").write_text(name)
    with pytest.raises(UserError, match="which does not exist; write the name of another one in it"):
        latest(checkpoint.parent)
