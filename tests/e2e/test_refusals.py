"""Bad input is one clear line and exit code 2, before any model is built and before anything is written."""

import json
import shutil

import pytest

from megatron_mopd.quantization.packed_folder import export_packed


@pytest.fixture
def run_folder(tmp_path):
    return tmp_path / "run"


def refusal(mopd, run_folder, *overrides, command="train"):
    """The one line that the command answers with."""
    result = mopd(command, f"run.folder={run_folder}", *overrides)
    assert result.returncode == 2, result
    assert not run_folder.exists()
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("objective.rmax=3", "unknown key objective.rmax; did you mean r_max?"),
        ("megatron.tensor_model_paralel_size=2", "unknown key megatron.tensor_model_paralel_size; did you mean"),
        ("prompts.efforts.medium=1", "no teacher for general/medium, agents/medium, coding/medium"),
        ("teachers.models.1.effort=low", "two teachers for general/low: general-low and general-high"),
        ("student.checkpoint=/usr", "student.checkpoint: /usr/config.json does not exist"),
        ("teachers.models.3.checkpoint=nowhere", "teachers.models.3 (agents-low): nowhere is not a folder"),
        ("megatron.lr_warmup_steps=5", "does not fit a schedule of"),
        ("launch.num_processes=3", "3 processes"),
        ("megatron.tensor_model_parallel_size=8", "attention heads (4)"),
        ("megatron.expert_model_parallel_size=3", "experts (8)"),
        ("objective.name=sft", "teachers.models is set, and objective.name=sft does not use it; remove it"),
        ("objective.name=full_kl", "which the embedded backend does not give; set teachers.backend=megatron"),
        ("sglang.weight_transport=distributed", "set rollout.engine=sglang, or remove the option"),
        ("environments.sums.factory=examples.quickstart.environments:Summs", "environments.sums.factory"),
    ],
)
def test_a_bad_option_is_one_line(mopd, run_folder, override, line):
    assert line in refusal(mopd, run_folder, override)


def test_a_prompt_without_a_domain_is_named_with_file_and_line(mopd, run_folder, tmp_path):
    file = tmp_path / "prompts.jsonl"
    row = {"id": "a", "domain": "general", "environment": "sums", "messages": [{"role": "user", "content": "1"}]}
    file.write_text(json.dumps(row) + "\n" + json.dumps({k: row[k] for k in ("environment", "messages")} | {"id": "b"}))
    assert f"{file}:2: no 'domain'" in refusal(mopd, run_folder, f"prompts.files=[{file}]")


def test_a_teacher_of_another_tokenizer_is_refused(mopd, run_folder, world, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(world / "other" / "base", other)
    tokenizer = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(tokenizer.replace('"dup"', '"pud"'))
    line = refusal(mopd, run_folder, f"teachers.models.8.checkpoint={other}")
    assert "teachers.models.8 (coding-max): another tokenizer" in line
    assert "'pud', the student's is 'dup'" in line


@pytest.mark.parametrize("table", ["megatron", "service.megatron"])
def test_precision_that_this_machine_does_not_have_is_refused(mopd, run_folder, monkeypatch, table):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    options = (f"{table}.fp8=e4m3", f"{table}.fp8_recipe=tensorwise", "teachers.backend=megatron")
    assert "megatron.fp8='e4m3' needs a GPU, and there is none here" in refusal(mopd, run_folder, *options)


def test_a_packed_teacher_is_refused_where_nothing_reads_it(mopd, run_folder, world, tmp_path):
    export_packed(world / "other" / "base", tmp_path / "packed")
    line = refusal(mopd, run_folder, f"teachers.models.3.checkpoint={tmp_path}/packed")
    assert "teachers.models.3 (agents-low)" in line
    assert f"python -m checkpoints_conversion.import_mxfp4 {tmp_path}/packed OUT" in line


def test_preflight_says_the_same_and_prints_the_coverage(mopd, run_folder):
    assert "no teacher for" in refusal(mopd, run_folder, "prompts.efforts.medium=1", command="preflight")
    result = mopd("preflight", f"run.folder={run_folder}", "--static")
    assert result.returncode == 0
    assert "agents/high" in result.stdout
    assert not run_folder.exists()


def test_serve_refuses_a_folder_that_cannot_be_written_to(mopd, tmp_path):
    (tmp_path / "file").touch()
    run_folder = tmp_path / "file" / "run"
    assert "is not a folder; choose another run.folder" in refusal(
        mopd, run_folder, "rollout.engine=sglang", command="serve"
    )
