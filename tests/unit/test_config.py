"""The configuration: overlays, overrides, refusals of one line, and the round trip through RUN/config.yaml."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron_mopd.config import load_config, split_arguments
from megatron_mopd.errors import UserError
from megatron_mopd.yaml_tree import overlay, override, read_yaml, write_yaml

ROOT = Path(__file__).parents[2]
PIPELINES = ("pipeline.yaml", "methods.yaml", "comparisons.yaml")  # see test_k3_pipeline.py
EXAMPLES = [f for f in sorted(ROOT.glob("examples/**/*.y*ml")) if f.name not in PIPELINES]

BASE = """
run: {folder: runs/x, num_steps: 3}
student: {checkpoint: student}
teachers:
  models:
    - {name: law-low, domain: law, effort: low, checkpoint: a}
    - {name: law-high, domain: law, effort: high, checkpoint: b}
prompts: {files: [a.jsonl, b.jsonl], batch_size: 4, mixture: {law: 1}, efforts: {low: 1, high: 1}}
environments: {law: {factory: "pkg.law:Law", options: {strict: true}}}
rollout: {max_response_tokens: 5}
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    file = tmp_path / "base.yaml"
    file.write_text(BASE)
    return file


def refusal(files: list[Path], *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(files, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_defaults_are_those_of_equation_15(base: Path) -> None:
    config = load_config([base])
    assert (config.objective.name, config.objective.r_max, config.objective.normalisation) == ("mopd", 5.0, "sequence")
    assert (config.rollout.temperature, config.rollout.top_p) == (1.0, 1.0)


def test_later_file_overlays_earlier_one_key_by_key(base: Path, tmp_path: Path) -> None:
    later = tmp_path / "later.yaml"
    later.write_text("run: {num_steps: 9}\nprompts: {files: [c.jsonl]}\nmegatron: {lr: 1.0}")
    config = load_config([base, later], ["run.seed=4"])
    assert (config.run.num_steps, config.run.seed, str(config.run.folder)) == (9, 4, "runs/x")
    assert config.prompts.files == (Path("c.jsonl"),), "lists are replaced, not merged"
    assert config.prompts.batch_size == 4


def test_override_reaches_lists_tables_and_free_names(base: Path) -> None:
    config = load_config(
        [base],
        [
            "teachers.models.1.checkpoint=elsewhere",
            "prompts.files.0=z.jsonl",
            "prompts.mixture.tax=0.5",
            "environments.law.options.strict=false",
            "objective.r_max=null",
            "sglang.server.mem_fraction_static=0.8",
        ],
    )
    assert [str(t.checkpoint) for t in config.teachers.models] == ["a", "elsewhere"]
    assert [str(f) for f in config.prompts.files] == ["z.jsonl", "b.jsonl"]
    assert config.prompts.mixture == {"law": 1.0, "tax": 0.5}
    assert config.environments["law"].options == {"strict": False}
    assert config.objective.r_max is None
    assert config.sglang.server == {"mem_fraction_static": 0.8}


def test_last_override_wins(base: Path) -> None:
    assert load_config([base], ["run.seed=1", "run.seed=2"]).run.seed == 2


@pytest.mark.parametrize(
    ("words", "files", "overrides"),
    [
        (["a.yaml", "run.seed=1", "b.yaml"], ["a.yaml", "b.yaml"], ["run.seed=1"]),
        (["runs/lr=1e-3/config.yaml", "run.folder=a/b=c"], ["runs/lr=1e-3/config.yaml"], ["run.folder=a/b=c"]),
        (["run.folder=" + "x" * 5000], [], ["run.folder=" + "x" * 5000]),
    ],
)
def test_words_are_files_or_overrides(words: list[str], files: list[str], overrides: list[str]) -> None:
    assert split_arguments(words) == (files, overrides)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("runn.seed=1", "unknown key runn; did you mean run?"),
        ("run.sed=1", "unknown key run.sed; did you mean seed?"),
        ("objective.rmax=1", "unknown key objective.rmax; did you mean r_max?"),
        ("teachers.models.1.chekpoint=x", "unknown key teachers.models.1.chekpoint; did you mean checkpoint?"),
        ("environments.law.factry=x", "unknown key environments.law.factry; did you mean factory?"),
        ("r_max=1", "unknown key r_max; did you mean objective.r_max?"),
        ("rollout.r_max=1", "unknown key rollout.r_max; did you mean objective.r_max?"),
        ("launch.zzz=1", "unknown key launch.zzz; known: num_processes, max_driver_restarts"),
    ],
)
def test_unknown_key_is_refused_with_the_nearest_known_one(base: Path, override: str, expected: str) -> None:
    assert refusal([base], override) == expected


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("objective.r_max=0", "objective.r_max=0: input should be greater than 0"),
        ("teachers.models.1.name=''", "teachers.models.1.name='': string should match pattern"),
        ('teachers.models.1.name="a\\n"', r"teachers.models.1.name='a\n': string should match pattern"),
        ("objective.name=ppo", "objective.name='ppo': input should be 'mopd', 'topk', 'full_kl', 'grpo' or 'sft'"),
        ("rollout.temperature=.inf", "rollout.temperature=inf: input should be a finite number"),
        ("rollout.top_p=1.5", "rollout.top_p=1.5: input should be less than or equal to 1"),
        ("prompts.mixture={}", "prompts.mixture={}: dictionary should have at least 1 item"),
        ("megatron=3", "megatron=3: input should be a valid dictionary"),
        ("prompts.files.2=c.jsonl", "2 is not an index into a list of 2"),
        ("prompts.files.last=c.jsonl", "last is not an index into a list of 2"),
        ("student.checkpoint.x=1", "what x would be set in is the value 'student', not a table"),
        ("run.seed={", "the value is not valid YAML"),
        ("run..seed=1", "write it as table.option=value"),
        ("run.seed=-1", "run.seed=-1: input should be greater than or equal to 0"),
        ("run.seed=true", "run.seed=True: true and false are no value of it"),
        ("run.num_steps=99999999999999999999", "input should be less than 2147483648"),
        ("run.timeout_s=1e300", "input should be less than or equal to 10000000"),
        ("rollout.temperature=1e-300", "input should be greater than or equal to 0.001"),
        ("prompts.effort_variable=''", "prompts.effort_variable='': string should match"),
        ("run.seed=2001-99-99", "the value is not valid YAML (it is not valid YAML: month must be in 1..12)"),
        ("megatron.lr=" + "[" * 3000 + "]" * 3000, "maximum recursion depth"),
        ("megatron.lr=&a [*a]", "more than 100000 values"),
        ("teachers.models." + "9" * 5000 + ".name=x", "is not an index into a list of 2"),
    ],
)
def test_bad_value_is_refused_in_one_line(base: Path, override: str, expected: str) -> None:
    assert expected in refusal([base], override)


def test_missing_option_is_named(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(BASE.replace("max_response_tokens: 5", "top_p: 1"))
    assert "rollout.max_response_tokens is missing; set it in the YAML file" in refusal([file])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run: {seed: 1}\nrun: {seed: 2}\n", "c.yaml:2: not valid YAML: run is set twice"),
        ("run: {seed: 1,\n", "c.yaml:2: not valid YAML"),
        ("- run\n", "must hold a mapping at its top, not a list"),
        ("run: \x00\n", "is not valid YAML"),
        ("run: {seed: !!int x}\n", "is not valid YAML: invalid literal for int()"),
        ("megatron: &a {x: *a}\n", "more than 100000 values; write it without aliases that multiply"),
        (
            "\n".join(["a0: &a0 x", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 40))]),
            "more than 100000 values",
        ),
    ],
)
def test_bad_file_is_refused_with_its_name(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    message = refusal([file])
    assert expected in message
    assert str(file) in message


def test_a_folder_is_no_config_file(tmp_path: Path) -> None:
    assert refusal([tmp_path]) == f"{tmp_path} is not a file"


def test_absent_file_is_refused(tmp_path: Path) -> None:
    assert refusal([tmp_path / "no.yaml"]) == f"config file {tmp_path / 'no.yaml'} does not exist"


def test_merge_keys_and_anchors_are_not_duplicates(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("a: {b: &B {x: 1}}\nc: {d: &D {<<: *B, x: 2}}\ne: {<<: *D, x: 3}\n")
    assert read_yaml(file) == {"a": {"b": {"x": 1}}, "c": {"d": {"x": 2}}, "e": {"x": 3}}


def test_engine_tables_pass_verbatim(base: Path) -> None:
    config = load_config([base], ["megatron={lr: 1e-4, adam_beta2: .95, moe_router_topk: 2, nested: {1: [a, null]}}"])
    assert config.megatron == {"lr": 1e-4, "adam_beta2": 0.95, "moe_router_topk": 2, "nested": {1: ["a", None]}}
    assert load_config([base], ["megatron.anything.at.all=1"]).megatron == {"anything": {"at": {"all": 1}}}


def test_config_is_frozen(base: Path) -> None:
    config = load_config([base])
    with pytest.raises(ValidationError, match="frozen"):
        config.run.seed = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_dumped_config_loads_to_the_same_config(base: Path, tmp_path: Path) -> None:
    config = load_config([base], ["megatron={lr: 1e-4, note: '1e-4', nested: {1: no}}", "objective.r_max=null"])
    resolved = tmp_path / "config.yaml"
    resolved.write_text(config.dump())
    assert load_config([resolved]) == config


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
TREES = st.dictionaries(
    st.text(min_size=1, max_size=4),
    SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=4) | st.integers(), SCALARS, max_size=3),
    max_size=4,
)
QUICK = settings(max_examples=50)


@QUICK
@given(TREES)
def test_written_yaml_reads_as_the_same_tree(tmp_path_factory: pytest.TempPathFactory, tree: dict) -> None:
    file = tmp_path_factory.getbasetemp() / "tree.yaml"
    file.write_text(write_yaml(tree), encoding="utf-8")
    assert read_yaml(file) == tree


@QUICK
@given(TREES, TREES)
def test_overlay_changes_neither_and_is_idempotent(below: dict, above: dict) -> None:
    before = (write_yaml(below), write_yaml(above))
    merged = overlay(below, above)
    assert overlay(merged, above) == merged
    assert (write_yaml(below), write_yaml(above)) == before


def test_override_leaves_aliased_tables_alone() -> None:
    shared = {"x": 1}
    tree = {"a": shared, "b": shared}
    assert override(tree, "a.x=2") == {"a": {"x": 2}, "b": {"x": 1}}
    assert tree == {"a": {"x": 1}, "b": {"x": 1}}


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_example_configuration_loads(file: Path) -> None:
    """A file that is meant to lie over another one says so in its first line: `# Over mopd.yaml: ...`."""
    below = re.match(r"# Over (\S+\.yaml)", file.read_text())
    config = load_config([file.parent / below[1], file] if below else [file])
    assert f"num_steps: {config.run.num_steps}" in config.dump()


@pytest.mark.parametrize("module", ["config", "types", "protocols", "errors", "cli", "preflight"])
def test_answering_at_once_imports_no_torch(module: str) -> None:
    heavy = ("torch", "transformers", "megatron", "sglang", "wandb")
    code = f"import sys, megatron_mopd.{module}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
