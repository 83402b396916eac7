"""Configuration to objects: the only module that names backends.

Backends are imported where they are chosen, so that the trainer never loads transformers models and the driver
never loads Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from megatron_mopd.config import Config
from megatron_mopd.hf_folder import read_hf_config
from megatron_mopd.link import DriverProcess, StepRequest
from megatron_mopd.mcore.layout import Layout
from megatron_mopd.protocols import RolloutEngine, TeacherScorer
from megatron_mopd.ranks import rank
from megatron_mopd.rollout.budget import final_taus
from megatron_mopd.rollout.environments import load_environments
from megatron_mopd.rollout.sampler import Sampling
from megatron_mopd.rollout.scheduler import Scheduler
from megatron_mopd.rollout.token_log import TokenLog
from megatron_mopd.run_lock import locked
from megatron_mopd.step_metrics import StepMetrics
from megatron_mopd.store import TrajectoryStore
from megatron_mopd.telemetry import trace
from megatron_mopd.telemetry.trace import NO_TRACE, Trace

if TYPE_CHECKING:
    from megatron_mopd.mcore.learner import Learner
    from megatron_mopd.prompts.demonstrations import Demonstration
    from megatron_mopd.prompts.render import Renderer
    from megatron_mopd.prompts.source import PromptSource
    from megatron_mopd.sglang.engine import FetchWeights
    from megatron_mopd.teachers.lanes import Lanes
    from megatron_mopd.teachers.no_teacher import NoTeacher
    from megatron_mopd.teachers.router import Router
    from megatron_mopd.telemetry.run_log import RunLog
    from megatron_mopd.types import Prompt


class Publisher(Protocol):
    def publish(self, learner: Learner, /) -> str | None:
        """Bring the weights of `learner.step` to the rollout engine; the folder from which it is to load them, or None
        if it has them already. Collective."""
        ...

    def close(self) -> None:
        """Leave nothing behind on the servers."""
        ...


@dataclass(frozen=True)
class TrainerParts:
    """What one rank trains with. The driver and the log live on rank 0 alone; their calls are collective."""

    config: Config
    learner: Learner
    publisher: Publisher
    store: TrajectoryStore
    driver: DriverProcess | None
    log: RunLog | None
    trace: Trace

    @property
    def is_rank_zero(self) -> bool:
        return self.driver is not None

    def request_batch(self, request: StepRequest) -> None:
        """Return on every rank once the batch is in the store."""
        from megatron_mopd.mcore.parallel import on_rank_zero
        from megatron_mopd.mcore.publish import FolderPublisher

        while not on_rank_zero(partial(self._ask, request)):  # a server missed what was broadcast
            folder = FolderPublisher(self.config.run.folder).publish(self.learner)
            request = replace(request, weights=folder)

    def _ask(self, request: StepRequest) -> bool:
        assert self.driver is not None
        return self.driver.request(request)

    def report(self, metrics: StepMetrics, seconds: Mapping[str, float]) -> None:
        if self.log is not None:
            self.log.step(metrics, self.store.rollout(metrics.step - 1), seconds)

    def save(self) -> None:
        from megatron_mopd.mcore import checkpoint

        checkpoint.save(self.learner, checkpoints_folder(self.config), keep=self.config.run.keep_checkpoints)


@contextmanager
def trainer_parts(config: Config) -> Iterator[TrainerParts]:
    """Join the process group, build this rank's parts, continue from the last checkpoint if there is one."""
    from megatron_mopd.mcore import checkpoint, parallel
    from megatron_mopd.mcore.learner import Learner
    from megatron_mopd.telemetry.record import replace_file
    from megatron_mopd.telemetry.run_log import RunLog

    with ExitStack() as stack:
        parallel.init_distributed(config.run.timeout_s)
        stack.callback(parallel.shutdown)
        parallel.initialize_parallel(Layout.from_table(config.megatron), config.run.seed)
        driver, log, trainer_trace = None, None, NO_TRACE
        if rank() == 0:
            stack.enter_context(locked(config.run.folder))
            replace_file(config.run.folder / "config.yaml", config.dump())
            stack.enter_context(servers(config))
            trainer_trace = trace_of(config, "trainer")
            driver = DriverProcess(config.run.folder, config.launch.max_driver_restarts, config.run.timeout_s)
            stack.callback(driver.close)
        learner = Learner(config)
        store = TrajectoryStore(config.run.folder)
        if saved := checkpoint.latest(checkpoints_folder(config)):
            checkpoint.load(learner, saved)
        if driver is not None:
            store.cut(learner.step)
            log = stack.enter_context(RunLog(config, next_step=learner.step + 1))
        to_engine = publisher(config)
        stack.callback(to_engine.close)
        yield TrainerParts(config, learner, to_engine, store, driver, log, trainer_trace)


def publisher(config: Config) -> Publisher:
    if config.rollout.engine == "sglang" and config.sglang.weight_transport == "distributed":
        from megatron_mopd.sglang.broadcast import Broadcaster

        return Broadcaster(config)
    from megatron_mopd.mcore.publish import FolderPublisher, NoEngine

    return NoEngine() if config.objective.name == "sft" else FolderPublisher(config.run.folder)


def servers(config: Config) -> AbstractContextManager[None]:
    """Start the servers that the configuration asks for; stop them on exit."""
    from megatron_mopd.servers import launch

    return launch.servers(config)


def student_servers(config: Config) -> AbstractContextManager[None]:
    """The same, with no teacher's."""
    return servers(config.model_copy(update={"teachers": config.teachers.model_copy(update={"models": ()})}))


def serve(config: Config) -> int:
    """`mopd serve`: the same servers, kept until Ctrl-C."""
    from megatron_mopd.servers import keeper

    return keeper.serve(config)


def trace_of(config: Config, process: str) -> Trace:
    return Trace(config.run.folder / trace.FILE, process) if config.telemetry.trace else NO_TRACE


def checkpoints_folder(config: Config) -> Path:
    return config.run.folder / "checkpoints"


@dataclass(frozen=True)
class DriverParts:
    """What the driver draws, samples, routes and scores with."""

    config: Config
    source: PromptSource[Prompt]
    renderer: Renderer
    sampling: Sampling
    scheduler: Scheduler
    token_log: TokenLog
    router: Router | NoTeacher
    lanes: Lanes | NoTeacher
    store: TrajectoryStore
    trace: Trace


def driver_parts(config: Config, fetch_weights: FetchWeights) -> DriverParts:
    from megatron_mopd.prompts.files import read_prompts
    from megatron_mopd.prompts.render import Renderer
    from megatron_mopd.prompts.source import PromptSource
    from megatron_mopd.teachers.no_teacher import NoTeacher
    from megatron_mopd.teachers.router import Router

    renderer = Renderer.of_student(config)
    driver_trace = trace_of(config, "driver")
    router = lanes = NoTeacher()
    if config.objective.needs_teachers:
        router = Router(config.teachers.models, config.prompts.cells)
        lanes = teacher_lanes(config, driver_trace)
    source = PromptSource(read_prompts(config.prompts.files), config.prompts, config.run.seed)
    student, prompts = sampling(config, renderer.tokenizer, fetch_weights), config.prompts
    return DriverParts(
        config=config,
        source=source,
        renderer=renderer,
        sampling=student,
        scheduler=Scheduler(
            source, renderer.render, student, prompts.batch_size, prompts.samples_per_prompt, config.rollout.partial
        ),
        token_log=TokenLog(config.run.folder / "trajectories"),
        router=router,
        lanes=lanes,
        store=TrajectoryStore(config.run.folder),
        trace=driver_trace,
    )


@dataclass(frozen=True)
class DemonstratorParts:
    """What supervised fine-tuning draws and renders with."""

    config: Config
    source: PromptSource[Demonstration]
    renderer: Renderer
    store: TrajectoryStore
    trace: Trace
    max_tokens: int
    """Of a demonstration: what the student has positions for."""


def demonstrator_parts(config: Config) -> DemonstratorParts:
    from megatron_mopd.prompts.demonstrations import read_demonstrations
    from megatron_mopd.prompts.render import Renderer
    from megatron_mopd.prompts.source import PromptSource

    demonstrations = read_demonstrations(config.demonstrations.files)
    return DemonstratorParts(
        config=config,
        source=PromptSource(demonstrations, config.prompts, config.run.seed, "demonstration"),
        renderer=Renderer.of_student(config),
        store=TrajectoryStore(config.run.folder),
        trace=trace_of(config, "driver"),
        max_tokens=read_hf_config(config.student.checkpoint, "student.checkpoint")["max_position_embeddings"],
    )


def sampling(config: Config, tokenizer: object, fetch_weights: FetchWeights | None = None) -> Sampling:
    """The student's rollout engine, starting from student.checkpoint, with the environments."""
    environments = load_environments(config.environments, tokenizer)
    hf_config = read_hf_config(config.student.checkpoint, "student.checkpoint")
    return Sampling(
        rollout_engine(config, fetch_weights),
        environments,
        config.rollout.max_response_tokens,
        vocab_size=hf_config["vocab_size"],
        max_tokens=hf_config["max_position_embeddings"],
        taus=final_taus(config),
    )


def rollout_engine(config: Config, fetch_weights: FetchWeights | None) -> RolloutEngine:
    if config.rollout.engine == "sglang":
        from megatron_mopd.sglang.engine import student_engine

        return student_engine(config, fetch_weights)
    from megatron_mopd.embedded.engine import EmbeddedEngine

    return EmbeddedEngine(
        config.student.checkpoint,
        seed=config.run.seed,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        max_batch_size=config.rollout.max_batch_size,
        num_threads=config.rollout.num_threads,
        retain_kv=config.rollout.partial.kv == "retain",
    )


def teacher_lanes(config: Config, trace: Trace = NO_TRACE) -> Lanes:
    """A lane for every teacher, with the endpoints that serve it."""
    from megatron_mopd.teachers.lanes import Lane, Lanes

    endpoints = teacher_endpoints(config)
    start = {"sglang": config.sglang.start_timeout_s, "megatron": config.service.start_timeout_s, "embedded": 1.0}
    table = {"sglang": "sglang", "megatron": "service", "embedded": "teachers"}
    lanes = {}
    for teacher in config.teachers.models:
        backend = teacher.backend or config.teachers.backend
        lanes[teacher.name] = Lane(
            teacher.name,
            endpoints[teacher.name],
            config.teachers,
            start_timeout_s=start[backend],
            start_option=f"{table[backend]}.start_timeout_s",
            check_hope=hope(config),
            with_hidden=config.objective.needs_hidden,
            trace=trace,
        )
    return Lanes(lanes, config.teachers)


def teacher_endpoints(config: Config) -> dict[str, Sequence[TeacherScorer]]:
    """Where each teacher can be scored, by its name."""
    found: dict[str, Sequence[TeacherScorer]] = {}
    if embedded := config.teachers.on("embedded"):
        from megatron_mopd.embedded.scorer import EmbeddedScorer

        folders = {t.name: t.checkpoint for t in embedded}
        threads = config.rollout.num_threads
        scorer = EmbeddedScorer(folders, temperature=config.rollout.temperature, num_threads=threads)
        found |= {t.name: [scorer] for t in embedded}
    if config.teachers.on("sglang"):
        from megatron_mopd.sglang import scorer as on_sglang

        found |= on_sglang.teacher_endpoints(config)
    if config.teachers.on("megatron"):
        from megatron_mopd.service import client as on_service

        found |= on_service.teacher_endpoints(config)
    return found


def hope(config: Config) -> Callable[[], None]:
    """What raises UserError once servers of this run that are down will not come back."""
    from megatron_mopd.servers.launch import check_keeper
    from megatron_mopd.servers.wanted import server_specs

    return (lambda: check_keeper(config.run.folder)) if server_specs(config) else (lambda: None)
