"""The miniature's pipelines, read without running: every stage's configuration is whole, and at home in one folder; the
methods that are compared have one budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_mopd.config import Config, load_config, split_arguments
from megatron_mopd.objective_options import check_objective_options
from megatron_mopd.pipeline.graph import Pipeline, Stage, load_pipeline
from megatron_mopd.teachers.router import Router
from megatron_mopd.types import Cell

ROOT = Path(__file__).parents[2]
FILE = Path("examples/k3_miniature/pipeline.yaml")
METHODS = Path("examples/k3_miniature/methods.yaml")
LEVELS = ("max", "high", "low")


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    monkeypatch.chdir(ROOT)
    return load_pipeline(FILE, ["folder=runs/elsewhere", "variables.seed=7"])


@pytest.fixture
def methods(monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    monkeypatch.chdir(ROOT)
    return load_pipeline(METHODS, ["folder=runs/elsewhere", "variables.seed=7"])


def config_of(stage: Stage) -> Config:
    return load_config(*split_arguments(stage.command[2:]))


def paths_of(value: object) -> list[Path]:
    if isinstance(value, Path):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [path for part in parts for path in paths_of(part)]


@pytest.mark.parametrize("file", [FILE, METHODS])
def test_every_stage_reads_and_writes_in_the_pipelines_folder_alone(
    monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    monkeypatch.chdir(ROOT)
    pipeline = load_pipeline(file, ["folder=runs/elsewhere", "variables.seed=7"])
    for stage in pipeline.stages:
        if stage.command[0] != "mopd" or stage.command[1] in ("report", "eval-table", "pipeline"):
            continue
        config = config_of(stage)
        if stage.command[1] == "train":
            check_objective_options(config)
        assert config.run.seed == 7
        paths = paths_of(config.model_dump(exclude={"sglang"}))
        assert len(paths) > 2
        assert [path for path in paths if not path.is_relative_to(pipeline.folder)] == [], stage.name
        made_before = [pipeline.by_name[name].produces for name in pipeline.ancestors[stage.name]]
        for path in paths:
            assert any(path.is_relative_to(product) for product in (stage.produces, config.run.folder, *made_before))


def test_methods_train_on_as_many_trajectories_of_the_same_prompts(pipeline: Pipeline, methods: Pipeline) -> None:
    mopd = config_of(pipeline.stage("mopd"))
    budget = mopd.run.num_steps * mopd.prompts.batch_size
    rl = [config_of(s) for s in pipeline.stages if "-" in s.name]
    of_teachers = sum(c.run.num_steps * c.prompts.batch_size * c.prompts.samples_per_prompt for c in rl)
    batch = mopd.prompts.batch_size
    budgets = {"mixed_rl_long": -(-(budget + of_teachers) // batch) * batch}  # whole batches, no fewer
    for name in ("topk", "no_r_max", "offpolicy", "mixed_rl", "mixed_rl_long", "cross_origin", "round_two"):
        config = config_of(methods.stage(name))
        trained = config.run.num_steps * config.prompts.batch_size * config.prompts.samples_per_prompt
        assert trained == budgets.get(name, budget), name
        assert config.prompts.mixture == mopd.prompts.mixture
        assert config.prompts.efforts == mopd.prompts.efforts
    samples = config_of(methods.stage("samples"))
    assert samples.run.num_steps * samples.prompts.batch_size == budget


def test_every_method_is_evaluated_against_the_teachers_of_the_main_pipeline(methods: Pipeline) -> None:
    evaluations = [stage for stage in methods.stages if stage.name.startswith("eval_")]
    assert len(evaluations) == 9
    for stage in evaluations:
        config, main = config_of(stage), methods.stage("main").produces
        assert stage.produces == config.run.folder / "summary.json"
        assert config.student.checkpoint == main / "sft" / "student"
        for teacher in config.teachers.models:
            assert teacher.checkpoint == main / "rl" / f"{teacher.domain}-{teacher.effort}" / "student"
        (method,) = stage.needs
        assert stage.produces.parent == methods.stage(method).produces


def test_the_cross_origin_control_names_the_teachers_that_it_swaps(methods: Pipeline) -> None:
    config = config_of(methods.stage("cross_origin"))
    second = {t.name for t in config.teachers.models if t.checkpoint.is_relative_to(methods.folder / "second_origin")}
    assert second == set(config.teachers.other_origin) == {"coding-low", "coding-high", "coding-max"}


def test_each_domain_is_one_chain_whose_levels_become_its_teachers(pipeline: Pipeline) -> None:
    for domain in ("general", "agents", "coding"):
        before = "sft"
        for level in LEVELS:
            stage = pipeline.stage(f"{domain}-{level}")
            config = config_of(stage)
            assert stage.needs == (before,)
            assert config.prompts.cells == (Cell(domain, level),)
            assert config.student.checkpoint == pipeline.by_name[before].produces / "student"
            assert config.run.folder == stage.produces
            if config.objective.needs_teachers:
                Router(config.teachers.models, config.prompts.cells)
                assert {t.checkpoint for t in config.teachers.models} == {pipeline.folder / "sft" / "student"}
            before = stage.name
    for name in ("mopd", "eval"):
        config = config_of(pipeline.stage(name))
        for teacher in config.teachers.models:
            assert teacher.checkpoint == pipeline.stage(str(teacher.cell).replace("/", "-")).produces / "student"
        assert config.student.checkpoint == pipeline.folder / "sft" / "student"


def test_the_table_has_every_method_at_every_seed(monkeypatch: pytest.MonkeyPatch, methods: Pipeline) -> None:
    monkeypatch.chdir(ROOT)
    comparisons = load_pipeline(Path("examples/k3_miniature/comparisons.yaml"))
    names, _, _ = zip(*(word.partition("=") for word in comparisons.stage("table").command[2:-2]), strict=True)
    runs = [word.partition("=")[2].split(",") for word in comparisons.stage("table").command[2:-2]]
    evaluated = [s.produces.parent.relative_to(methods.folder) for s in methods.stages if s.name.startswith("eval_")]
    assert len(set(names)) == len(runs) == len(evaluated) + 1
    for of_method in runs:
        (method,) = {Path(run).relative_to(comparisons.folder / f"seed{i}") for i, run in enumerate(of_method)}
        assert len(of_method) == 3
        assert method in {*evaluated, Path("main/mopd")}


def test_the_file_runs_in_the_folder_that_the_configurations_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that `mopd eval examples/k3_miniature/mopd.yaml` reads what the pipeline has made."""
    monkeypatch.chdir(ROOT)
    pipeline = load_pipeline(FILE)
    mopd = pipeline.stage("mopd")
    assert config_of(mopd) == load_config([mopd.command[2]])
