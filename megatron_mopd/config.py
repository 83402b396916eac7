"""The configuration: one frozen tree, filled from YAML files (later ones overlay earlier ones) and `a.b=c` overrides.

Torch-free, so that `mopd` answers at once. Each option has its one default here. The tables `megatron:` and `sglang:` carry
the engines' own option names and are handed to them verbatim. Every mistake is a UserError of one line.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from megatron_mopd.errors import UserError
from megatron_mopd.types import Cell


class Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Run(Table):
    folder: Path
    """Everything the run writes: config.yaml, metrics.jsonl, checkpoints/, trajectories/, weights/, summary.json."""
    seed: int = 0
    num_steps: PositiveInt
    save_every_steps: PositiveInt = 50
    keep_checkpoints: PositiveInt = 2
    timeout_s: PositiveFloat = 1800.0
    """How long a rank waits for a batch or a collective before the run is given up."""


class Student(Table):
    checkpoint: Path
    """Hugging Face folder of the SFT policy from which the student starts."""


class Teacher(Table):
    name: str
    domain: str
    effort: str
    checkpoint: Path

    @property
    def cell(self) -> Cell:
        return Cell(self.domain, self.effort)


class Teachers(Table):
    backend: Literal["embedded"] = "embedded"
    batch_tokens: PositiveInt = 16384
    """A lane sends its waiting trajectories once they hold this many tokens, and the rest when sampling has ended."""
    models: tuple[Teacher, ...] = ()


class Prompts(Table):
    files: tuple[Path, ...]
    """JSONL, one prompt a line: id, domain, environment, messages; optional effort, label, metadata."""
    eval_files: tuple[Path, ...] = ()
    batch_size: PositiveInt
    """Prompts drawn per step; one trajectory each."""
    mixture: dict[str, PositiveFloat]
    """Weight of each domain."""
    efforts: dict[str, PositiveFloat] = Field(default={"low": 1.0, "high": 1.0, "max": 1.0})
    """Weight of each effort level within a domain."""
    effort_variable: str = "thinking_effort"
    """The chat template's variable for the effort; the teachers' prompts are rendered without it."""

    @property
    def cells(self) -> tuple[Cell, ...]:
        return tuple(Cell(domain, effort) for domain in self.mixture for effort in self.efforts)


class Environment(Table):
    factory: str
    """`package.module:Class`, see protocols.EnvironmentFactory."""
    options: dict[str, Any] = Field(default={})


class Rollout(Table):
    engine: Literal["embedded"] = "embedded"
    temperature: PositiveFloat = 1.0
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    max_response_tokens: PositiveInt
    """Sampled and observed tokens of a trajectory together."""
    max_batch_size: PositiveInt = 1024
    """Sequences that the embedded engine decodes at once."""
    num_threads: PositiveInt = 1
    """CPU threads of an operator in the driver (embedded engine and teachers)."""


class Objective(Table):
    name: Literal["mopd", "sft"] = "mopd"
    r_max: PositiveFloat | None = 5.0
    """Bound on the teacher log-ratio of a token (eq. 15); null for none."""
    normalisation: Literal["sequence", "token"] = "sequence"
    """sequence: mean over trajectories of their mean over tokens. token: mean over all trained tokens of the batch."""


class Learner(Table):
    micro_batch_tokens: PositiveInt = 16384
    """Most tokens of a packed micro-batch on one rank; a longer trajectory is a micro-batch of its own."""


class Telemetry(Table):
    display: bool = True
    tensorboard: bool = False
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    wandb_project: str = "megatron_mopd"


class Evaluation(Table):
    prompts_per_cell: PositiveInt = 512


class Launch(Table):
    num_processes: PositiveInt = 1
    """Ranks that `mopd train` starts on this machine; under torchrun, torchrun decides."""
    max_driver_restarts: NonNegativeInt = 3


class Config(Table):
    run: Run
    student: Student
    teachers: Teachers = Teachers()
    prompts: Prompts
    environments: dict[str, Environment]
    rollout: Rollout
    objective: Objective = Objective()
    learner: Learner = Learner()
    telemetry: Telemetry = Telemetry()
    evaluation: Evaluation = Evaluation()
    launch: Launch = Launch()
    megatron: dict[str, Any] = Field(default={})
    """Fields of Megatron-Core's TransformerConfig, OptimizerConfig, DistributedDataParallelConfig, OptimizerParamScheduler."""
    sglang: dict[str, Any] = Field(default={})

    def dump(self) -> str:
        """The resolved tree as YAML; loading it gives this config again."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def load_config(files: Sequence[Path | str], overrides: Sequence[str] = ()) -> Config:
    """Read YAML files in order, apply `a.b=c` overrides, validate.

    Raises UserError for a missing file, bad YAML, an unknown key (with the nearest known one) or a bad value.
    """
    tree: dict[str, Any] = {}
    for file in files:
        tree = _overlay(tree, _read_yaml(Path(file)))
    for override in overrides:
        _override(tree, override)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise UserError("; ".join(_explain(e) for e in error.errors())) from None


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Command-line words to (YAML files, overrides)."""
    overrides = [a for a in arguments if "=" in a and not Path(a).is_file()]
    return [a for a in arguments if a not in overrides], overrides


def _read_yaml(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise UserError(f"config file {file} does not exist")
    try:
        tree = yaml.safe_load(file.read_text()) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{file} must hold a mapping at its top, not a {type(tree).__name__}")
    return tree


def _overlay(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _overlay(merged[key], value) if both else value
    return merged


def _override(tree: dict[str, Any], override: str) -> None:
    path, _, text = override.partition("=")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise UserError(f"override {override!r}: the value is not valid YAML") from None
    *parents, leaf = path.split(".")
    node: Any = tree
    for key in parents:
        if isinstance(node, list):
            node = node[_index(node, key, override)]
        else:
            node = node.setdefault(key, {})
        if not isinstance(node, dict | list):
            raise UserError(f"override {override!r}: {key} is a value, not a table")
    if isinstance(node, list):
        node[_index(node, leaf, override)] = value
    else:
        node[leaf] = value


def _index(items: list[Any], key: str, override: str) -> int:
    if not key.isdigit() or int(key) >= len(items):
        raise UserError(f"override {override!r}: {key} is not an index below {len(items)}")
    return int(key)


def _explain(error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        known = _known_keys(error["loc"][:-1])
        near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
        return f"unknown key {where}" + (f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known)}")
    if error["type"] == "missing":
        return f"{where} is missing; set it in the YAML file or as {where}=VALUE"
    return f"{where}={error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}"


def _known_keys(path: Sequence[Any]) -> list[str]:
    """The field names of the table that `path` leads to; list indices and free names on the way keep the table."""
    table: type[Table] = Config
    for part in path:
        if part in table.model_fields:
            annotation = table.model_fields[part].annotation
            candidates = (annotation, *typing.get_args(annotation))
            table = next((t for t in candidates if isinstance(t, type) and issubclass(t, Table)), table)
    return list(table.model_fields)
