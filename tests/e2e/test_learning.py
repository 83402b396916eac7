"""The runs that make teachers, as a user starts them: supervised fine-tuning, reinforcement learning on outcomes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from small_run import Mopd, metrics

from examples.quickstart.tasks import DOMAINS, EFFORTS, TASKS
from examples.quickstart.world import to_messages
from megatron_mopd.config import load_config
from megatron_mopd.preflight import check_budgets
from megatron_mopd.prompts.files import read_prompts

TEMPLATE = """\
<{{ messages[0].content }}> <{{ thinking_effort | default('neutral') }}> {{ messages[1].content }} <think>
{%- for m in messages[2:] %} {{ m.content }}{% endfor -%}
"""
ONE_PROCESS = {"tensor_model_parallel_size": 1, "expert_model_parallel_size": 1}


def overlay(folder: Path, name: str, **tables: Any) -> Mopd:
    """`mopd` on the quickstart's configuration with these over it."""
    tree = {
        "run": {"num_steps": 4, "save_every_steps": 2},
        "teachers": {"models": []},
        "launch": {"num_processes": 1},
        "megatron": {**ONE_PROCESS, "lr": 1e-2, "lr_warmup_steps": 0, "lr_decay_style": "constant"},
        **tables,
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(tree))
    return Mopd(file)


@pytest.fixture(scope="module")
def sft(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Mopd:
    folder = tmp_path_factory.mktemp("sft")
    shutil.copytree(world / "one" / "base", folder / "base")
    (folder / "base" / "chat_template.jinja").write_text(TEMPLATE)
    rng, lines = Random(0), []
    for i in range(20):
        for domain in DOMAINS:
            for effort in EFFORTS:
                task = TASKS[domain].draw(rng)
                said = " ".join(task.demonstrate(3, 0.0, rng).words)
                messages = [*to_messages(domain, task), {"role": "assistant", "content": said}]
                row = {"id": f"{domain}-{effort}-{i}", "domain": domain, "effort": effort, "messages": messages}
                lines.append(json.dumps(row) + "\n")
    (folder / "demonstrations.jsonl").write_text("".join(lines))
    return overlay(
        folder,
        "sft",
        student={"checkpoint": str(folder / "base")},
        demonstrations={"files": [str(folder / "demonstrations.jsonl")], "neutral_fraction": 0.25},
        prompts={"batch_size": 36, "files": []},
        objective={"name": "sft", "normalisation": "token"},
    )


@pytest.fixture(scope="module")
def grpo(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Mopd:
    """Rewards of a toy for the prompts of sums, with a reference policy and every device on."""
    folder = tmp_path_factory.mktemp("grpo")
    base = str(world / "one" / "base")
    reference = {"name": "reference", "domain": "general", "effort": "low", "checkpoint": base}
    return overlay(
        folder,
        "grpo",
        student={"checkpoint": base},
        teachers={"models": [reference]},
        environments={"sums": {"factory": "tests.toy_environment:FirstHalf"}},
        prompts={
            "files": [str(world / "one/prompts/general.jsonl")],
            "eval_files": [],
            "batch_size": 8,
            "samples_per_prompt": 8,
            "effort_variable": None,
        },
        objective={"name": "grpo", "beta": 0.01, "ratio": {"clip_low": 0.2, "clip_high": 0.3, "mask_high": 10.0}},
        budgets={"start": 2.0},
    )


ONE_CELL = ("prompts.mixture={general: 1}", "prompts.efforts={low: 1}")


def whole_and_resumed(mopd: Mopd, folder: Path, *overrides: str) -> tuple[Path, Path]:
    """The folder of a run, and one that went on from the checkpoint in its middle. (What a kill at any moment leaves
    is test_run.py's.)"""
    whole, resumed = folder / "whole", folder / "resumed"
    result = mopd("train", f"run.folder={whole}", *overrides)
    assert result.returncode == 0, result.stderr
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "student")
    (resumed / "checkpoints" / "latest").write_text("step_00000002")
    result = mopd("train", f"run.folder={resumed}", *overrides)
    assert result.returncode == 0, result.stderr
    return whole, resumed


def assert_bitwise_equal(whole: Path, resumed: Path) -> None:
    assert metrics(resumed) == metrics(whole)
    for file in (whole / "student").glob("*.safetensors"):
        assert (resumed / "student" / file.name).read_bytes() == file.read_bytes()


def test_fine_tuning_learns_and_resumes_bitwise(sft: Mopd, tmp_path: Path) -> None:
    whole, resumed = whole_and_resumed(sft, tmp_path)
    assert_bitwise_equal(whole, resumed)
    rows = metrics(whole)
    assert rows[-1]["train/loss"] < 0.8 * rows[0]["train/loss"]
    assert not [key for key in rows[0] if key.startswith("rollout/") or "mismatch" in key or "reverse_kl" in key]
    lines = [json.loads(line) for line in (whole / "trajectories/step_00000002/rows.jsonl").read_text().splitlines()]
    assert len(lines) == 36
    assert 0 < sum(line["neutral"] for line in lines) < 18
    assert not (whole / "weights").exists(), "nobody samples, so nobody is sent the weights"


def test_reinforcement_learning_resumes_bitwise_over_the_lanes_of_its_reference(grpo: Mopd, tmp_path: Path) -> None:
    whole, resumed = whole_and_resumed(grpo, tmp_path, *ONE_CELL)
    assert_bitwise_equal(whole, resumed)
    rows = metrics(whole)
    assert len((whole / "trajectories/step_00000000/rows.jsonl").read_text().splitlines()) == 64
    assert abs(rows[0]["train/reverse_kl"]) < 1e-5, "the student is its reference at first"
    assert rows[-1]["train/reverse_kl"] > 1e-3
    assert {"train/ratio_clipped", "train/ratio_masked", "rollout/even_groups"} <= rows[0].keys()
    assert "train/ratio_truncated" not in rows[0]
    # Over (0.6 * 4) steps from 2 to 0.34.
    taus = [row["cell/general/low/tau"] for row in rows]
    assert taus == pytest.approx([2.0, 2.0 - 1.66 / 2.4, 2.0 - 2 * 1.66 / 2.4, 0.34])


def test_rewards_rise(grpo: Mopd, tmp_path: Path) -> None:
    """Without a reference: nothing is scored."""
    words = ("objective.beta=0", "teachers.models=[]", "run.num_steps=6", "run.save_every_steps=6")
    result = grpo("train", f"run.folder={tmp_path / 'run'}", *ONE_CELL, *words)
    assert result.returncode == 0, result.stderr
    rewards = [row["rollout/reward"] for row in metrics(tmp_path / "run")]
    assert rewards[0] < 0.7
    assert min(rewards[-2:]) > 0.9
    assert "train/reverse_kl" not in metrics(tmp_path / "run")[0]


def test_budgets_writes_prompts_that_say_what_they_take(grpo: Mopd, world: Path, tmp_path: Path) -> None:
    source = tmp_path / "general.jsonl"
    rows = [json.loads(line) for line in (world / "one/prompts/general.jsonl").read_text().splitlines()[:20]]
    rows = [{key: value for key, value in row.items() if key != "budget_tokens"} for row in rows]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (f"run.folder={tmp_path / 'run'}", f"prompts.files=[{source}]", "prompts.eval_files=[]")
    few = "budgets.estimate.samples_per_prompt=4"
    result = grpo("budgets", *words, *ONE_CELL, few)
    assert result.returncode == 0, result.stderr
    assert "b0 1.0 tokens (1.0 to 1.0) over 20 prompts" in result.stdout
    written = [json.loads(line) for line in (tmp_path / "run/prompts/general.jsonl").read_text().splitlines()]
    assert [{**row, "metadata": {}} for row in rows] == [
        {**{k: v for k, v in row.items() if k != "budget_tokens"}, "metadata": {}} for row in written
    ]
    assert {row["budget_tokens"] for row in written} == {1.0}
    assert {row["metadata"]["budget"]["samples"] for row in written} == {4}
    summary = json.loads((tmp_path / "run/budgets.json").read_text())
    assert summary["general"]["fallbacks"] == sum(row["metadata"]["budget"]["fallback"] for row in written)
    check_budgets(load_config(grpo.config, ONE_CELL), read_prompts([tmp_path / "run/prompts/general.jsonl"]))
