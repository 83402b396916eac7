"""Laws of the graph of a pipeline: order, variables, and every mistake in the file as one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megatron_mopd import cli
from megatron_mopd.errors import UserError
from megatron_mopd.pipeline.graph import Pipeline, Stage, load_pipeline
from megatron_mopd.pipeline.slurm import sbatch_command


def stage(name: str, *needs: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "needs": list(needs), "command": ["true"], "produces": f"$folder/{name}"} | fields


def write(place: Path, *stages: dict[str, Any], **fields: Any) -> Path:
    file = place / "pipeline.yaml"
    file.write_text(yaml.safe_dump({"folder": str(place / "run"), "stages": list(stages)} | fields))
    return file


@pytest.mark.parametrize(
    ("stages", "line"),
    [
        ([stage("a", "c"), stage("b", "a"), stage("c", "b")], "in a circle: a -> c -> b -> a; remove one of the needs"),
        ([stage("a", "a")], "in a circle: a -> a"),
        ([stage("sft"), stage("rl", "sfd")], "stage rl needs sfd, which is no stage; did you mean sft?"),
        ([stage("a"), stage("a")], "two stages are named a; rename one of them"),
        ([{"name": "a", "produces": "$folder/a"}], "stage a: command is missing"),
        ([stage("a", command=[])], "stage a: command is empty"),
        ([stage("a", produces="/elsewhere/a")], "stage a produces /elsewhere/a, which is not inside"),
        ([stage("a", produces="$folder/../b")], "which is not inside"),
        ([stage("a", produces="$folder")], "which is not inside"),
        ([stage("a", produces="$folder/logs/a")], "are the pipeline's own folders; choose another name"),
        ([stage("a"), stage("b", produces="$folder/a")], "stages b and a produce the same"),
        (
            [stage("a"), stage("b", produces="$folder/a/b")],
            "stage b writes into it without needing a; add a to the needs",
        ),
        ([stage("a", "b"), stage("b", produces="$folder/a/b")], "stage b writes into it without needing a"),
        ([stage("a", comand=["x"])], "unknown key stage a: comand; did you mean command?"),
        ([stage("a", inputs=["nowhere.yaml"])], "stage a has the input nowhere.yaml, which is not a file"),
        ([stage("a", command=["x", "k=$folder/rl/low"])], "/run/rl/low, which no stage makes; correct it, or add the"),
        (
            [stage("a"), stage("b"), stage("c", "b", command=["x", "k=[$folder/b/x, $folder/a/x]"])],
            "/run/a/x, which stage a makes; add a to its needs",
        ),
        (
            [stage("a"), stage("b", "a", produces="$folder/a/y"), stage("c", "a", command=["x", "$folder/a/y"])],
            "/run/a/y, which stage b makes; add b to its needs",
        ),
        ([stage("a b")], "stage a b: name='a b': string should match pattern"),
        ([stage("a", command=["x", "$sede"])], "stage a: no variable sede for $sede; did you mean seed?"),
        ([stage("a", command=["x", "5$"])], "stage a: 5$ has a $ that names no variable; write $$ for a dollar"),
        ([stage("a", slurm={"time": 14400})], 'slurm: write the time in quotes, time: "4:00:00"'),
        ([], "stages is empty"),
        (["a"], "stages.0='a'"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_file(tmp_path: Path, stages: list[Any], line: str) -> None:
    file = write(tmp_path, *stages, variables={"seed": 0})
    with pytest.raises(UserError) as caught:
        load_pipeline(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert line in str(caught.value)


def test_an_unknown_key_of_the_file_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown key max_paralel; did you mean max_parallel\?"):
        load_pipeline(write(tmp_path, stage("a"), max_paralel=2))


def test_mistakes_end_the_command_with_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, stage("a"))
    for words in ([], [str(file), "--stage"], [str(file), "--stage", "b"], [str(file), str(file)], ["nowhere.yaml"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["pipeline", *words])
        assert ended.value.code == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_variables_and_the_folder_are_filled_in(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        stage("a", command=["mopd", "run.seed=$seed", "$folder/a/x", "$$1"], produces="$folder/a"),
        folder=str(tmp_path / "seed$seed"),
        variables={"seed": 0},
    )
    (a,) = load_pipeline(file, ["variables.seed=3"]).stages
    assert a.command == ("mopd", "run.seed=3", f"{tmp_path}/seed3/a/x", "$1")
    assert a.produces == tmp_path / "seed3" / "a"


def test_a_command_may_name_what_is_made_before_it_and_what_is_the_user_s_own(tmp_path: Path) -> None:
    """Also a folder that holds what is made, in any of the ways in which options are written."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/mine.yaml").touch()
    words = ["x=$folder/a/student,$folder/rl", "[$folder/b]", "{k: $folder/c/y}", "$folder/mine.yaml", "$folder-2/x"]
    before = [stage("a"), stage("b", "a", produces="$folder/rl/b"), stage("b2", "b", produces="$folder/b")]
    load_pipeline(write(tmp_path, *before, stage("c", "b2", command=["x", *words])))


def test_a_product_may_lie_in_that_of_a_stage_that_comes_before(tmp_path: Path) -> None:
    file = write(tmp_path, stage("eval", "b", produces="$folder/a/x"), stage("b", "a"), stage("a"))
    assert [s.name for s in load_pipeline(file).ordered] == ["a", "b", "eval"]


@given(st.lists(st.sets(st.integers(0, 9)), min_size=1, max_size=10), st.randoms())
def test_every_stage_comes_after_what_it_needs(needs: list[set[int]], random: Any) -> None:
    stages = [
        Stage(name=f"s{i}", needs=tuple(f"s{j}" for j in of if j < i), command=("true",), produces=Path(f"r/{i}"))
        for i, of in enumerate(needs)
    ]
    random.shuffle(stages)
    pipeline = Pipeline(folder=Path("r"), stages=tuple(stages))
    names = [s.name for s in pipeline.ordered]
    assert sorted(names) == sorted(s.name for s in stages)
    for s in stages:
        assert all(names.index(need) < names.index(s.name) for need in s.needs)
        assert pipeline.ancestors[s.name] >= set(s.needs)
        assert all(pipeline.stages_after[need] > pipeline.stages_after[s.name] for need in s.needs)


def test_slurm_gets_the_command_of_one_stage_after_the_jobs_that_it_needs(tmp_path: Path) -> None:
    """As a line: what Slurm makes of it is not shown here."""
    file = write(
        tmp_path,
        stage("sft"),
        stage("world"),
        stage("rl", "world", "sft", slurm={"gres": "gpu:8", "time": "2:00:00"}),
        slurm={"partition": "long", "time": "1:00:00"},
    )
    pipeline = load_pipeline(file)
    words = [str(file), "variables.name=it's"]
    command = sbatch_command(pipeline, pipeline.stage("rl"), words, {"sft": "17", "world": "18"}, Path("/here"))
    assert command[:-1] == [
        "sbatch",
        "--parsable",
        "--job-name=rl",
        "--chdir=/here",
        f"--output={tmp_path}/run/logs/rl.slurm",
        "--open-mode=append",
        "--dependency=afterok:18:17",
        "--kill-on-invalid-dep=yes",
        "--partition=long",
        "--time=2:00:00",
        "--gres=gpu:8",
    ]
    assert command[-1].startswith("--wrap=exec ")
    assert command[-1].endswith(f"""-m megatron_mopd.cli pipeline {file} 'variables.name=it'"'"'s' --stage rl""")
    first = sbatch_command(pipeline, pipeline.stage("sft"), words, {}, Path("/here"))
    assert not [word for word in first if word.startswith(("--dependency", "--kill"))]
