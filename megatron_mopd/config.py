"""The configuration: one frozen tree, filled from YAML files (later ones overlay earlier ones) and `a.b=c` overrides.

Torch-free, so that `mopd` answers at once. Each option has its one default here. `megatron:` and the `server` tables of
`sglang:` carry the engines' own option names and are handed to them verbatim. Paths are relative to the working
directory. Every mistake is a UserError of one line.
"""

from __future__ import annotations

import difflib
import math
import reprlib
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError, ValidationInfo, field_validator

from megatron_mopd.errors import UserError
from megatron_mopd.types import Cell
from megatron_mopd.yaml_tree import Tree, overlay, override, read_yaml, write_yaml


class Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError("true and false are no value of it")  # pydantic would read 1 and 0
        return value


Count = Annotated[int, Field(ge=1, lt=1 << 31)]
Seconds = Annotated[float, Field(gt=0.0, le=1e7)]


class Run(Table):
    folder: Path
    """Everything the run writes: config.yaml, metrics.jsonl, checkpoints/, trajectories/, weights/, summary.json."""
    seed: int = Field(default=0, ge=0, lt=1 << 31)
    num_steps: Count
    save_every_steps: Count = 50
    keep_checkpoints: Count = 2
    timeout_s: Seconds = 1800.0
    """How long a rank waits for a batch or a collective before the run is given up."""


class Student(Table):
    checkpoint: Path
    """Hugging Face folder of the SFT policy from which the student starts."""


Backend = Literal["embedded", "sglang", "megatron"]


class Teacher(Table):
    name: str = Field(pattern=r'^[^\x00-\x1f"\\]+$')  # it stands in messages, headers and labels of metrics
    domain: str
    effort: str
    checkpoint: Path
    """Hugging Face folder."""
    megatron_checkpoint: Path | None = None
    """Megatron distributed checkpoint with the weights (RUN/checkpoints/step_...), for backend megatron; `checkpoint`
    then gives config and tokenizer."""
    backend: Backend | None = None
    """Where it is served; null: teachers.backend."""

    @property
    def cell(self) -> Cell:
        return Cell(self.domain, self.effort)


class Teachers(Table):
    backend: Backend = "embedded"
    """embedded: in the driver. sglang: on servers, see `sglang`. megatron: by a teacher service, see `service`."""
    batch_tokens: Count = 16384
    """A lane sends its waiting trajectories once they hold this many tokens, and the rest with the last of its step."""
    max_in_flight: Count = 4
    """Requests of a lane in flight at one endpoint."""
    attempt_timeout_s: Seconds = 600.0
    """A request without its whole reply after so long is given up, and its endpoint counts as dead."""
    max_attempts: Count = 8
    """Attempts at a request, on whatever endpoints, before the run is given up."""
    recovery_timeout_s: Seconds = 600.0
    """How long a lane waits for one of its endpoints to come back before the run is given up."""
    max_lag_steps: int = Field(default=0, ge=0, le=1000)
    """Steps in a row that a lane without an endpoint may be left out of; its trajectories are trained on once it has
    scored them. 0: every step waits for every lane."""
    lag_after_s: Seconds = 60.0
    """How long a step waits for such a lane after sampling has ended."""
    max_initial_kl: PositiveFloat = 0.15
    """Gate against teachers of another origin: a teacher's reverse KL per token from the initial student."""
    other_origin: tuple[str, ...] = ()
    """Names of teachers that are known to be of another origin: they are measured, and may be above the gate."""
    origin_prompts: Count = 16
    """Trajectories per cell that `mopd preflight` samples to measure it."""
    models: tuple[Teacher, ...] = ()

    @property
    def backends(self) -> frozenset[Backend]:
        """Those in use."""
        return frozenset(teacher.backend or self.backend for teacher in self.models)

    def on(self, backend: Backend) -> tuple[Teacher, ...]:
        """The teachers that are served there, in the order of `models`."""
        return tuple(teacher for teacher in self.models if (teacher.backend or self.backend) == backend)


class Prompts(Table):
    files: tuple[Path, ...] = ()
    """JSONL, one prompt a line: id, domain, environment, messages; optional effort, label, metadata, budget_tokens."""
    eval_files: tuple[Path, ...] = ()
    batch_size: Count
    """Prompts (sft: demonstrations) drawn per step."""
    samples_per_prompt: Count = 1
    """Trajectories of each: the group whose rewards are compared."""
    mixture: dict[str, PositiveFloat] = Field(min_length=1)
    """Weight of each domain."""
    efforts: dict[str, PositiveFloat] = Field(default={"low": 1.0, "high": 1.0, "max": 1.0}, min_length=1)
    """Weight of each effort level within a domain."""
    effort_variable: str | None = Field(default="thinking_effort", pattern=r"^[A-Za-z_]\w*$")
    """The chat template's variable for the effort; the teachers' prompts are rendered without it. null: so are the
    student's, which then becomes the expert of an effort that it does not read."""
    chat_template: Literal["checkpoint", "xtml"] = "checkpoint"
    """checkpoint: that of student.checkpoint. xtml: that of this project, for any tokenizer that has its four special
    tokens; see docs/gateway.md."""
    template_variables: dict[str, Any] = Field(default={})
    """Of the chat template, set for every prompt: some templates keep thinking only where a variable says so."""
    keep_thinking: bool = False
    """Refuse a template that drops the thinking of earlier turns, before the run. `mopd gateway` always does."""

    @property
    def cells(self) -> tuple[Cell, ...]:
        return tuple(Cell(domain, effort) for domain in self.mixture for effort in self.efforts)


class Demonstrations(Table):
    files: tuple[Path, ...] = ()
    """JSONL or parquet, one demonstration a line: id, domain, messages; optional effort, metadata."""
    neutral_fraction: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of them that is rendered without the effort, as teachers read prompts."""


class BudgetEstimate(Table):
    """How `mopd budgets` measures b0(x)."""

    estimator: Literal["median_correct", "quantile"] = "median_correct"
    """median_correct: the median of what correct trajectories spend. quantile: of what all of them spend."""
    quantile: float = Field(default=0.5, gt=0.0, le=1.0)
    samples_per_prompt: Count = 16
    effort: str | None = None
    """At which the cold-start model is asked; null: without any."""


class Budgets(Table):
    tau: dict[str, float | dict[str, float]] = Field(default={})
    """Effort to tau, or domain to effort to tau: a trajectory may spend tau times its prompt's budget_tokens. Empty: no
    budgets."""
    start: PositiveFloat | None = None
    """Where tau begins in reinforcement learning; null: at its own value."""
    anneal_fraction: float = Field(default=0.6, gt=0.0, le=1.0)
    """Share of run.num_steps after which tau has its own value."""
    estimate: BudgetEstimate = BudgetEstimate()

    @field_validator("tau", mode="before")
    @classmethod
    def _positive(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for key, taus in value.items():
                for name, tau in taus.items() if isinstance(taus, dict) else [(key, taus)]:
                    if type(tau) not in (int, float) or not 0 < tau < math.inf:
                        raise ValueError(f"tau of {name} must be a number above 0, not {reprlib.repr(tau)}")
            if len({isinstance(taus, dict) for taus in value.values()}) > 1:
                raise ValueError("either {effort: tau} or {domain: {effort: tau}}, not both in one")
        return value

    def tau_of(self, cell: Cell) -> float | None:
        """None where the cell has none."""
        taus = self.tau.get(cell.domain)
        tau = taus.get(cell.effort) if isinstance(taus, dict) else self.tau.get(cell.effort)
        return tau if isinstance(tau, float) else None


class Environment(Table):
    factory: str
    """`package.module:Class`, see protocols.EnvironmentFactory."""
    options: dict[str, Any] = Field(default={})


class Partial(Table):
    """Partial rollouts: more prompts in flight than a step trains on, see rollout/scheduler.py."""

    oversampling: float = Field(default=1.0, ge=1.0, le=64.0)
    """Prompts in flight, in batches: a step ends once one batch is whole. 1: synchronous, nothing is interrupted."""
    max_staleness: int = Field(default=4, ge=0, le=1000)
    """Most weight versions between the first token of a prompt's samples and the step that trains on them; a step waits
    for what would grow older. At least oversampling - 1."""
    kv: Literal["recompute", "retain"] = "recompute"
    """Of what is interrupted. recompute: no key or value of older weights is ever used. retain: they stay, and what is
    sampled after them is marked (rollout/stale_kv_share)."""


class Rollout(Table):
    engine: Literal["embedded", "sglang"] = "embedded"
    temperature: float = Field(default=1.0, ge=1e-3, le=1e3)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    max_response_tokens: Count
    """Sampled and observed tokens of a trajectory together."""
    max_batch_size: Count = 1024
    """Sequences that the embedded engine decodes at once."""
    num_threads: Count = 1
    """CPU threads of an operator in the driver (embedded engine and teachers)."""
    router_replay: bool = False
    """R3: the learner's experts are those that the rollout engine chose for each token (sglang only)."""
    partial: Partial = Partial()


class StudentServers(Table):
    num_servers: Count = 1
    """Started by this project, unless `urls` names servers that run already."""
    urls: tuple[str, ...] = ()
    server: dict[str, Any] = Field(default={})
    """SGLang's own ServerArgs for these servers, over `sglang.server`."""


class TeacherServers(Table):
    num_servers: Count | None = None
    """null: one for each teacher. Fewer: teachers of one architecture take turns on a server, which then loads the
    weights of the next one from its checkpoint. More: the first teachers have more than one."""
    urls: dict[str, tuple[str, ...]] = Field(default={})
    """Teacher name to the URLs of servers that run already and serve its checkpoint."""
    server: dict[str, Any] = Field(default={})


class SGLang(Table):
    python: Path | None = None
    """Interpreter of the environment that has SGLang; null: this one."""
    host: str = "127.0.0.1"
    api_key_env: str | None = None
    """Environment variable with the servers' key; needed for a host that other machines can reach."""
    server: dict[str, Any] = Field(default={})
    """SGLang's own ServerArgs, verbatim, for every server that is started."""
    student: StudentServers = StudentServers()
    teachers: TeacherServers = TeacherServers()
    weight_transport: Literal["disk", "distributed"] = "disk"
    """disk: a folder that all machines see. distributed: broadcast from the ranks that own the weights."""
    check_weights: bool = False
    """Compare a checksum of every tensor after each sync (slow; for debugging)."""
    max_requests: Count = 256
    """Requests in flight on one server."""
    start_timeout_s: Seconds = 900.0
    request_timeout_s: Seconds = 600.0
    """Silence on a request after which its server counts as dead."""
    recovery_timeout_s: Seconds = 600.0
    """How long work waits for a dead server before the run is given up."""


class Service(Table):
    """The Megatron teacher service (`mopd serve-teacher`): it serves every teacher whose backend is megatron."""

    urls: tuple[str, ...] = ()
    """Services that run already, each of which serves all these teachers. Empty: the run starts one."""
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, lt=1 << 16)
    """Of `mopd serve-teacher`; 0: a free one."""
    api_key_env: str | None = None
    """Environment variable with the key; needed for a host that other machines can reach."""
    num_processes: Count = 1
    """Ranks that are started on this machine."""
    megatron: dict[str, Any] = Field(default={})
    """Its layout and precision: fields of Megatron-Core's TransformerConfig, as in the table `megatron`."""
    micro_batch_tokens: Count = 16384
    """Most tokens of a packed forward pass on one rank; a longer trajectory is a pass of its own."""
    batch_tokens: Count = 65536
    """Waiting requests for one teacher are scored together up to so many tokens."""
    max_waiting_tokens: Count = 1 << 22
    """Beyond it requests are refused with 429 until others are done."""
    resident_teachers: Count | None = None
    """Teachers whose weights stay on the device, the least recently used leave first; null: all."""
    offloaded_teachers: Annotated[int, Field(ge=0)] | None = None
    """Teachers whose weights stay in host memory besides; null: all others. What is in neither is read again."""
    start_timeout_s: Seconds = 900.0


class Gateway(Table):
    """The OpenAI-compatible endpoint for external harnesses, see docs/gateway.md."""

    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, lt=1 << 16)
    """0: a free one."""
    api_key_env: str | None = None
    """Environment variable with the key; needed for a host that other machines can reach."""


class Advantage(Table):
    """What a group's rewards become; see objectives/advantages.py."""

    baseline_floor: float | None = None
    """The baseline is at least this: a group below it learns only what not to do. null: none."""
    std: Literal["group", "none"] = "group"
    """group: divided by the standard deviation of the group's rewards."""
    min_std: PositiveFloat = 0.1
    """The least divisor."""


class Ratio(Table):
    """Three devices on exp(student - rollout log-prob) of a token, each off where null; see objectives/ratio.py."""

    clip_low: float | None = Field(default=None, gt=0.0, le=1.0)
    clip_high: PositiveFloat | None = None
    """PPO: no gradient for a token that has left [1 - clip_low, 1 + clip_high] on the side to which it is pushed."""
    mask_low: float | None = Field(default=None, ge=0.0)
    mask_high: PositiveFloat | None = None
    """IcePop: nor for one that lies outside [mask_low, mask_high]."""
    truncate_low: float | None = Field(default=None, ge=0.0)
    truncate_high: PositiveFloat | None = None
    """TIS: the ratio as a weight is kept within these."""

    @property
    def clips(self) -> bool:
        return self.clip_low is not None or self.clip_high is not None

    @property
    def masks(self) -> bool:
        return self.mask_low is not None or self.mask_high is not None

    @property
    def truncates(self) -> bool:
        return self.truncate_low is not None or self.truncate_high is not None

    @property
    def is_on(self) -> bool:
        return self.clips or self.masks or self.truncates


class Objective(Table):
    name: Literal["mopd", "topk", "full_kl", "grpo", "sft"] = "mopd"
    """topk, full_kl: the exact reverse KL over the vocabulary; every teacher on the backend megatron. grpo: the outcome
    alone. sft: demonstrations."""
    r_max: PositiveFloat | None = 5.0
    """mopd: bound on the teacher log-ratio of a token (eq. 15); null for none."""
    outcome_weight: float = Field(default=0.0, ge=0.0)
    """mopd: alpha, with which the outcome's advantage is added to the log-ratio."""
    beta: float = Field(default=0.0, ge=0.0)
    """grpo: weight of the KL per token to the reference policy, which is then the teacher of every cell."""
    top_k: Count = 64
    """topk: tokens of the teacher's that are summed over."""
    advantage: Advantage = Advantage()
    """grpo, and mopd with an outcome_weight."""
    ratio: Ratio = Ratio()
    """grpo and mopd."""
    normalisation: Literal["sequence", "token"] = "sequence"
    """sequence: mean over trajectories of their mean over tokens. token: mean over all trained tokens of the batch."""
    domain_weights: dict[str, PositiveFloat] = Field(default={})
    """Factors of the domains' trajectories in the loss, 1 for a domain without; only their ratios matter."""
    domain_balance: Literal["none", "inverse_deviation"] = "none"
    """inverse_deviation: a domain's factor falls with the standard deviation of its advantages, within [1/4, 4]."""

    @property
    def needs_hidden(self) -> bool:
        """The teachers' last hidden states, from which the learner makes their distributions."""
        return self.name in ("topk", "full_kl")

    @property
    def distils(self) -> bool:
        """The teachers are what is learnt from, each in its cell."""
        return self.name in ("mopd", "topk", "full_kl")

    @property
    def needs_teachers(self) -> bool:
        """Something is scored: by the teachers, or by the reference policy."""
        return self.distils or (self.name == "grpo" and self.beta > 0)

    @property
    def needs_outcomes(self) -> bool:
        """Groups of trajectories are compared by their rewards."""
        return self.name == "grpo" or (self.name == "mopd" and self.outcome_weight > 0)

    @property
    def weighs_domains(self) -> bool:
        return bool(self.domain_weights) or self.domain_balance != "none"


class Learner(Table):
    micro_batch_tokens: Count = 16384
    """Most tokens of a packed micro-batch on one rank; a longer trajectory is a micro-batch of its own."""


class Quantization(Table):
    """Of the student's routed experts, and of nothing else: the same values in training, rollout and export."""

    experts: Literal["none", "mxfp4"] = "none"
    rule: Literal["floor", "even", "rceil"] = "even"
    """How the scale of a block is chosen; see quantization/formats.py."""
    report_every_steps: Count = 10
    audit: bool = False
    """Compare what was exported with what is trained, tensor by tensor, after each export (slow; for debugging)."""


class Telemetry(Table):
    display: bool = True
    tensorboard: bool = False
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    wandb_project: str = "megatron_mopd"
    trace: bool = True
    """RUN/trace.json: what trainer, driver and lanes did when, for Perfetto."""


class Evaluation(Table):
    prompts_per_cell: Count = 512


class Launch(Table):
    num_processes: Count = 1
    """Ranks that `mopd train` starts on this machine; under torchrun, torchrun decides."""
    max_driver_restarts: int = Field(default=3, ge=0)


class Config(Table):
    run: Run
    student: Student
    teachers: Teachers = Teachers()
    prompts: Prompts
    demonstrations: Demonstrations = Demonstrations()
    environments: dict[str, Environment] = Field(default={})
    budgets: Budgets = Budgets()
    rollout: Rollout
    objective: Objective = Objective()
    learner: Learner = Learner()
    quantization: Quantization = Quantization()
    telemetry: Telemetry = Telemetry()
    evaluation: Evaluation = Evaluation()
    launch: Launch = Launch()
    megatron: dict[str, Any] = Field(default={})
    """Fields of Megatron-Core's TransformerConfig, OptimizerConfig, DistributedDataParallelConfig and
    OptimizerParamScheduler."""
    sglang: SGLang = SGLang()
    service: Service = Service()
    gateway: Gateway = Gateway()

    def dump(self) -> str:
        """The resolved tree as YAML; loading it gives this config again."""
        return write_yaml(self.model_dump())


def load_config(files: Sequence[Path | str], overrides: Sequence[str] = ()) -> Config:
    """Read YAML files in order, apply `a.b=c` overrides, validate.

    Raises UserError for a missing file, bad YAML, an unknown key (with the nearest known one) or a bad value.
    """
    tree: Tree = {}
    for file in files:
        tree = overlay(tree, read_yaml(Path(file)))
    for text in overrides:
        tree = override(tree, text)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise UserError("; ".join(_explain(e) for e in error.errors())) from None


def check_domains(config: Config) -> None:
    """UserError where `objective.domain_weights` names a domain that is never drawn."""
    for domain in config.objective.domain_weights:
        if domain not in config.prompts.mixture:
            raise UserError(
                f"objective.domain_weights.{domain}: no such domain in prompts.mixture, which has "
                f"{', '.join(config.prompts.mixture)}; correct or remove it"
            )


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Command-line words to (YAML files, overrides). A word with "=" is an override, unless a "/" comes before it."""
    overrides = [a for a in arguments if "=" in a and "/" not in a.partition("=")[0]]
    return [a for a in arguments if a not in overrides], overrides


def _explain(error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"unknown key {where}; {_suggest(error['loc'])}"
    if error["type"] == "missing":
        return f"{where} is missing; set it in the YAML file or as {where}=VALUE"
    if error["type"] == "tuple_type":
        return f"{where}={reprlib.repr(error['input'])}: it should be a list, {where}=[...]"
    message = error["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    return f"{where}={reprlib.repr(error['input'])}: {message}"


def _suggest(path: Sequence[Any]) -> str:
    """The nearest key of the same table, else the same key of another table, else all keys of this table."""
    *parents, key = (str(part) for part in path)
    known = _known_keys(parents)
    if near := difflib.get_close_matches(key, known, n=1):
        return f"did you mean {near[0]}?"
    tables = {name: _table(field.annotation, Config) for name, field in Config.model_fields.items()}
    elsewhere = [f"{name}.{key}" for name, table in tables.items() if key in table.model_fields and name not in parents]
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere)}?"
    return f"known: {', '.join(known)}"


def _known_keys(path: Sequence[str]) -> list[str]:
    """The field names of the table that `path` leads to; list indices and free names on the way keep the table."""
    table: type[Table] = Config
    for part in path:
        if part in table.model_fields:
            table = _table(table.model_fields[part].annotation, table)
    return list(table.model_fields)


def _table(annotation: Any, otherwise: type[Table]) -> type[Table]:
    """The Table in an annotation such as `tuple[Teacher, ...]` or `dict[str, Environment]`."""
    candidates = (annotation, *typing.get_args(annotation))
    return next((t for t in candidates if isinstance(t, type) and issubclass(t, Table)), otherwise)
