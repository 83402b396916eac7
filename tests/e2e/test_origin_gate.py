"""The same-origin gate where users meet it: `mopd preflight`, and the first batch of `mopd train`."""

from __future__ import annotations

import re

from examples.quickstart.world import CELLS


def test_preflight_refuses_a_teacher_of_another_origin_with_what_it_measured(mopd, world, tmp_path):
    """All teachers are the student itself, but coding-max is a model of another initialisation."""
    own = [f"teachers.models.{i}.checkpoint={world}/one/base" for i in range(len(CELLS) - 1)]
    same_prompts = "prompts.effort_variable=unread_by_the_template"  # the student reads what its teacher reads
    gate = ("teachers.max_initial_kl=0.3", "teachers.origin_prompts=8")
    result = mopd("preflight", f"run.folder={tmp_path}/run", *own, same_prompts, *gate)
    assert result.returncode == 2, result

    table = dict(re.findall(r"^  (\w+-\w+) +(\S+) ± \d\.\d{3}  \d+ tokens of 8", result.stdout, re.MULTILINE))
    assert list(table) == [f"{c.domain}-{c.effort}" for c in CELLS]
    foreign = table.pop("coding-max")
    assert all(abs(float(kl)) < 1e-3 for kl in table.values())
    assert 0.6 < float(foreign) < 1.3
    assert "warning: teacher coding-max is unlike the others, which are around 0.000" in result.stdout
    refusal = result.stderr.strip().splitlines()[-1]
    assert f"per token above teachers.max_initial_kl=0.3: teacher coding-max {foreign} ± " in refusal
    assert not (tmp_path / "run").exists()


def test_train_refuses_it_before_the_first_update(mopd, tmp_path):
    result = mopd("train", f"run.folder={tmp_path}/run", "teachers.max_initial_kl=0.3")
    assert result.returncode == 2, result
    refusal = result.stderr.strip().splitlines()[-1]
    assert "per token above teachers.max_initial_kl=0.3: teacher general-low " in refusal
    assert not list((tmp_path / "run" / "trajectories").glob("step_*/batch.safetensors"))


def test_a_name_in_other_origin_lets_that_teacher_through(mopd, world, tmp_path):
    own = [f"teachers.models.{i}.checkpoint={world}/one/base" for i in range(len(CELLS) - 1)]
    words = (*own, "prompts.effort_variable=unread_by_the_template", "teachers.max_initial_kl=0.3")
    allowed = mopd(
        "train", f"run.folder={tmp_path}/run", *words, "teachers.other_origin=[coding-max]", "run.num_steps=1"
    )
    assert allowed.returncode == 0, allowed
    assert (tmp_path / "run" / "student" / "config.json").is_file()
    unknown = mopd("preflight", "--static", f"run.folder={tmp_path}/other", "teachers.other_origin=[coding-mux]")
    assert unknown.returncode == 2
    assert "teachers.other_origin: no teacher is named coding-mux; known: general-low" in unknown.stderr
