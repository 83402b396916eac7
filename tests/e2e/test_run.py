"""The whole loop as a user runs it: trainer ranks, driver, embedded engine and teachers."""

import json
import os
import signal

import pytest
from small_run import assert_nothing_left, metrics, processes_of, wait_for_step

from megatron_mopd.telemetry.record import read_record


def test_a_run_leaves_what_it_promises(undisturbed):
    rows = metrics(undisturbed)
    assert [row["step"] for row in read_record(undisturbed)] == [1, 2, 3, 4]
    assert all(row["train/reverse_kl"] > 0 for row in rows)
    assert all(row["train/mismatch_max"] < 1e-4 for row in rows)
    assert all(row["rollout/staleness"] == 0 for row in rows)
    for name in ("config.yaml", "student/config.json", "student/tokenizer.json", "checkpoints", "driver.log"):
        assert (undisturbed / name).exists()
    batch = undisturbed / "trajectories" / "step_00000003"
    assert len((batch / "rows.jsonl").read_text().splitlines()) == 36
    assert_nothing_left(undisturbed)


def test_training_brings_the_student_to_its_teacher(undisturbed):
    rows = metrics(undisturbed)
    assert rows[-1]["train/reverse_kl"] < 0.8 * rows[0]["train/reverse_kl"]


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGINT])
def test_stop_and_resume_is_bitwise_the_run_that_never_stopped(mopd, undisturbed, tmp_path, sig):
    run_folder = tmp_path / "run"
    process = mopd.start("train", f"run.folder={run_folder}")
    wait_for_step(process, run_folder, 3)
    if sig == signal.SIGKILL:
        os.killpg(process.pid, sig)
    else:
        process.send_signal(sig)
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    if sig == signal.SIGINT:
        assert process.returncode == 130
        assert "Traceback" not in err
    assert_nothing_left(run_folder)

    result = mopd("train", f"run.folder={run_folder}")
    assert result.returncode == 0, result.stderr
    assert metrics(run_folder) == metrics(undisturbed)
    student = "student/model.safetensors"
    names = sorted(p.name for p in (run_folder / student).parent.glob("*.safetensors"))
    for name in names:
        assert (run_folder / "student" / name).read_bytes() == (undisturbed / "student" / name).read_bytes()


def test_a_dead_driver_is_started_again_and_nothing_changes(mopd, undisturbed, tmp_path):
    run_folder = tmp_path / "run"
    process = mopd.start("train", f"run.folder={run_folder}")
    wait_for_step(process, run_folder, 1)
    (driver,) = [pid for pid, words in processes_of(run_folder).items() if "megatron_mopd.driver" in words]
    os.kill(driver, signal.SIGKILL)
    _out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert metrics(run_folder) == metrics(undisturbed)


def test_student_equals_teacher_gives_zero_reward_through_the_whole_path(mopd, world, tmp_path):
    """Law 3: embedded sampling, embedded scoring, Megatron at TP2 x EP2; no effort in the prompt, so contexts are
    equal."""
    run_folder = tmp_path / "run"
    same = world / "one" / "base"
    result = mopd(
        "train",
        f"run.folder={run_folder}",
        "run.num_steps=1",
        "prompts.effort_variable=unread_by_the_template",
        *[f"teachers.models.{i}.checkpoint={same}" for i in range(9)],
    )
    assert result.returncode == 0, result.stderr
    (row,) = metrics(run_folder)
    assert abs(row["train/reverse_kl"]) < 1e-5
    assert abs(row["train/loss"]) < 1e-4
    assert row["train/clip_fraction"] == 0
    assert row["train/mismatch_max"] < 1e-4


def test_tp2_pp2_has_the_first_loss_of_one_process(mopd, tmp_path):
    one = mopd(
        "train",
        f"run.folder={tmp_path / 'one'}",
        "run.num_steps=1",
        "launch.num_processes=1",
        "megatron.tensor_model_parallel_size=1",
        "megatron.expert_model_parallel_size=1",
    )
    assert one.returncode == 0, one.stderr
    four = mopd.torchrun(
        4, f"run.folder={tmp_path / 'four'}", "run.num_steps=1", "megatron.pipeline_model_parallel_size=2"
    )
    _, err = four.communicate(timeout=300)
    assert four.returncode == 0, err
    (first,), (other,) = metrics(tmp_path / "one"), metrics(tmp_path / "four")
    assert other["train/loss"] == pytest.approx(first["train/loss"], abs=1e-5)
    assert other["train/grad_norm"] == pytest.approx(first["train/grad_norm"], rel=1e-4)


def test_eval_writes_the_summary_and_report_reads_it(mopd, undisturbed):
    result = mopd("eval", f"run.folder={undisturbed}")
    assert result.returncode == 0, result.stderr
    summary = json.loads((undisturbed / "summary.json").read_text())
    assert {(c["domain"], c["effort"]) for c in summary["cells"]} == {
        (d, e) for d in ("general", "agents", "coding") for e in ("low", "high", "max")
    }
    for key in (
        "mean_recovery",
        "mean_recovery_raw",
        "worst_recovery",
        "reverse_kl_first",
        "reverse_kl_last",
        "wall_s",
        "layout",
    ):
        assert key in summary


def test_what_the_driver_refuses_is_the_one_line_of_the_job(mopd, tmp_path):
    """The reason is known to the driver alone; the other rank does not end the job before rank 0 has said it."""
    result = mopd("train", f"run.folder={tmp_path / 'run'}", "rollout.max_response_tokens=4096")
    assert result.returncode == 2
    assert [line for line in result.stderr.splitlines() if line.startswith("mopd: error: ")], result.stderr
    assert "max_position_embeddings" in result.stderr
    assert "rank 1" not in result.stderr
    assert_nothing_left(tmp_path / "run")
