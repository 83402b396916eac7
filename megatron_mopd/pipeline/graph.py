"""The graph of a pipeline: its YAML file as frozen tables, and every mistake in it as one line.

    folder: runs/mine                  # logs, records, and all that the stages make
    max_parallel: 2
    variables: {seed: 0}               # `mopd pipeline FILE variables.seed=1`
    stages:
      - name: sft
        command: [mopd, train, sft.yaml, run.folder=$folder/sft, run.seed=$seed]
        produces: $folder/sft
      - name: eval
        needs: [sft]
        command: [mopd, eval, sft.yaml, run.folder=$folder/sft]
        produces: $folder/sft/summary.json
        inputs: [data/eval.jsonl]      # beside the files that the command names

`$folder` and `$name` of a variable stand for their values in every text of a stage; `$$` is a dollar. Promises
(tests/unit/test_pipeline_graph.py): stages come in an order in which each follows what it needs; a product is in the
folder, is made by one stage, and contains no product of a stage that does not come after it; what a command names in
the folder is there by then, made by a stage that it needs or by itself.
"""

from __future__ import annotations

import difflib
import re
import reprlib
import string
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from megatron_mopd.config import Count, Table
from megatron_mopd.errors import UserError
from megatron_mopd.yaml_tree import override, read_yaml

OWN_FOLDERS = ("pipeline", "logs")
"""Of the pipeline itself: records and locks, and the stages' output."""

SlurmOptions = dict[str, str | int]
"""sbatch's own long options without their dashes: {partition: gpu, time: "4:00:00"}."""


class Stage(Table):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")  # it names files and jobs
    needs: tuple[str, ...] = ()
    command: tuple[str, ...] = Field(min_length=1)
    """Words, no shell. `mopd` and `python` are those of the environment that runs the pipeline. A list among them
    stands for its words, so that stages can share some (`&name [...]`, `*name`)."""
    produces: Path
    """All that the command leaves behind, as one file or folder: of `mopd train` the run's folder. It is there when
    the command has succeeded, and is moved aside when the stage is made from something else."""
    inputs: tuple[Path, ...] = ()
    """Files that the stage is made from, beside those that stand in `command` and those that other stages make."""
    slurm: SlurmOptions = Field(default={})
    """Over those of the pipeline."""

    @field_validator("command", mode="before")
    @classmethod
    def _flat(cls, command: Any) -> Any:
        if not isinstance(command, list):
            return command
        return list(_words(command))


def _words(command: list[Any]) -> Iterator[Any]:
    for part in command:
        if isinstance(part, list):
            yield from _words(part)
        else:
            yield part


class Pipeline(Table):
    folder: Path
    max_parallel: Count = 1
    """Stages that run at a time on this machine."""
    launcher: Literal["local", "slurm"] = "local"
    slurm: SlurmOptions = Field(default={})
    variables: dict[str, str | int | float] = Field(default={})
    stages: tuple[Stage, ...] = Field(min_length=1)

    @cached_property
    def by_name(self) -> dict[str, Stage]:
        return {stage.name: stage for stage in self.stages}

    @cached_property
    def ancestors(self) -> dict[str, frozenset[str]]:
        """Name to the names of all stages that must be done before it."""
        known: dict[str, frozenset[str]] = {}
        for stage in in_order(self.stages):
            known[stage.name] = frozenset(stage.needs).union(*(known[need] for need in stage.needs))
        return known

    @cached_property
    def ordered(self) -> tuple[Stage, ...]:
        """Every stage after what it needs, else as in the file."""
        return tuple(in_order(self.stages))

    @cached_property
    def stages_after(self) -> dict[str, int]:
        """Name to the length of the longest chain that waits for it: those with the longest are started first."""
        longest = dict.fromkeys(self.by_name, 0)
        for stage in reversed(self.ordered):
            for need in stage.needs:
                longest[need] = max(longest[need], longest[stage.name] + 1)
        return longest

    def stage(self, name: str) -> Stage:
        if name not in self.by_name:
            raise UserError(f"no stage {name}; {_nearest(name, list(self.by_name))}")
        return self.by_name[name]


def load_pipeline(file: Path, overrides: Sequence[str] = ()) -> Pipeline:
    """Read the file, apply `a.b=c` overrides, fill the variables in, check. Every mistake is a UserError of one line
    that begins with the file."""
    tree = read_yaml(file)
    for text in overrides:
        tree = override(tree, text)
    try:
        pipeline = _filled(Pipeline.model_validate(tree))
        check(pipeline)
    except ValidationError as error:
        raise UserError(f"{file}: {'; '.join(_explain(e, tree) for e in error.errors())}") from None
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    return pipeline


def check(pipeline: Pipeline) -> None:
    names = [stage.name for stage in pipeline.stages]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two stages are named {name}; rename one of them")
    for stage in pipeline.stages:
        for need in stage.needs:
            if need not in names:
                raise UserError(f"stage {stage.name} needs {need}, which is no stage; {_nearest(need, names)}")
    for table in (pipeline, *pipeline.stages):
        if isinstance(table.slurm.get("time"), int):  # 4:00:00 is 14400 to YAML, which Slurm reads as minutes
            raise UserError('slurm: write the time in quotes, time: "4:00:00"')
    for stage in pipeline.ordered:  # refuses a cycle
        _check_product(stage, pipeline)
        _check_inputs(stage, pipeline)
        _check_command(stage, pipeline)


def in_order(stages: Sequence[Stage]) -> Iterator[Stage]:
    waiting, done = list(stages), set[str]()
    while waiting:
        ready = next((stage for stage in waiting if done.issuperset(stage.needs)), None)
        if ready is None:
            raise UserError(
                f"stages need each other in a circle: {' -> '.join(_circle(waiting))}; remove one of the needs"
            )
        waiting.remove(ready)
        done.add(ready.name)
        yield ready


def _circle(waiting: Sequence[Stage]) -> list[str]:
    """Each needs the one after it. From any stage that cannot run, a need that cannot run either leads on."""
    by_name = {stage.name: stage for stage in waiting}
    path = [waiting[0].name]
    while path.count(path[-1]) < 2:
        path.append(next(need for need in by_name[path[-1]].needs if need in by_name))
    return path[path.index(path[-1]) :]


def _check_product(stage: Stage, pipeline: Pipeline) -> None:
    folder, product = pipeline.folder.resolve(), stage.produces.resolve()
    where = f"stage {stage.name} produces {stage.produces}"
    if folder not in product.parents:
        raise UserError(f"{where}, which is not inside {pipeline.folder}; write it as $folder/...")
    if product.relative_to(folder).parts[0] in OWN_FOLDERS:
        raise UserError(f"{where}: {' and '.join(OWN_FOLDERS)} are the pipeline's own folders; choose another name")
    for other in pipeline.stages:
        if other is stage or not (theirs := other.produces.resolve()).is_relative_to(product):
            continue
        if theirs == product:
            raise UserError(
                f"stages {other.name} and {stage.name} produce the same {stage.produces}; each needs its own"
            )
        if stage.name not in pipeline.ancestors[other.name]:
            raise UserError(
                f"{where}, and stage {other.name} writes into it without needing {stage.name}; add {stage.name} to the "
                f"needs of {other.name}, or choose another place"
            )


def _check_inputs(stage: Stage, pipeline: Pipeline) -> None:
    for file in stage.inputs:
        made = any(file.resolve().is_relative_to(pipeline.by_name[n].produces.resolve()) for n in stage.needs)
        if not made and not file.is_file():
            raise UserError(f"stage {stage.name} has the input {file}, which is not a file; correct or remove it")


def _check_command(stage: Stage, pipeline: Pipeline) -> None:
    known = {stage.name, *pipeline.ancestors[stage.name]}
    products = {other.name: other.produces.resolve() for other in pipeline.stages}
    for path in _named_inside(stage.command, pipeline.folder):
        place, where = path.resolve(), f"stage {stage.name} names {path}"
        makers = [name for name in products if place.is_relative_to(products[name])]
        if not makers and not place.exists() and not any(products[name].is_relative_to(place) for name in known):
            raise UserError(f"{where}, which no stage makes; correct it, or add the stage")
        maker = max(makers, key=lambda name: len(products[name].parts), default=stage.name)
        if maker not in known:
            raise UserError(f"{where}, which stage {maker} makes; add {maker} to its needs")


def _named_inside(words: Sequence[str], folder: Path) -> Iterator[Path]:
    """The paths below the folder that stand in the words, by themselves or as values of options."""
    begins, goes_on = r"(?<![^\s=,:\[\](){}'\"])", r"/[^\s=,:\[\](){}'\"]+"
    for word in words:
        yield from map(Path, re.findall(begins + re.escape(str(folder)) + goes_on, word))


def _filled(pipeline: Pipeline) -> Pipeline:
    """With the variables in place of their names."""
    values = {name: str(value) for name, value in pipeline.variables.items()}
    folder = Path(_substitute(str(pipeline.folder), values, "folder"))
    values |= {"folder": str(folder)}
    stages = tuple(_filled_stage(stage, values) for stage in pipeline.stages)
    return pipeline.model_copy(update={"folder": folder, "stages": stages})


def _filled_stage(stage: Stage, values: dict[str, str]) -> Stage:
    fill: Callable[[object], str] = lambda text: _substitute(str(text), values, f"stage {stage.name}")  # noqa: E731
    return stage.model_copy(
        update={
            "command": tuple(map(fill, stage.command)),
            "produces": Path(fill(stage.produces)),
            "inputs": tuple(Path(fill(file)) for file in stage.inputs),
        }
    )


def _substitute(text: str, values: dict[str, str], where: str) -> str:
    try:
        return string.Template(text).substitute(values)
    except KeyError as error:
        name = error.args[0]
        raise UserError(f"{where}: no variable {name} for {text}; {_nearest(name, list(values))}") from None
    except ValueError:
        raise UserError(f"{where}: {text} has a $ that names no variable; write $$ for a dollar") from None


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"


def _explain(error: Any, tree: Any) -> str:
    *parents, key = error["loc"] or ("",)
    table = Stage if parents and parents[0] == "stages" else Pipeline
    where = _where(error["loc"], tree)
    if error["type"] == "extra_forbidden":
        return f"unknown key {where}; {_nearest(str(key), list(table.model_fields))}"
    if error["type"] == "missing":
        return f"{where} is missing"
    if error["type"] == "too_short":
        return f"{where} is empty"
    message = error["msg"].removeprefix("Value error, ")
    return f"{where}={reprlib.repr(error['input'])}: {message[:1].lower()}{message[1:]}"


def _where(loc: Sequence[Any], tree: Any) -> str:
    """stages.3.command as `stage sft: command`, if stage 3 has got a name."""
    if len(loc) > 2 and loc[0] == "stages" and isinstance(stage := tree["stages"][loc[1]], dict):
        rest = ".".join(str(part) for part in loc[2:])
        return f"stage {stage.get('name', loc[1])}: {rest}"
    return ".".join(str(part) for part in loc)
