"""Configuration to objects: the only module that names backends.

Backends are imported where they are chosen, so that the trainer never loads transformers models and the driver never loads
Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_mopd.config import Config
from megatron_mopd.prompts.files import read_prompts
from megatron_mopd.prompts.render import Renderer
from megatron_mopd.prompts.source import PromptSource
from megatron_mopd.protocols import RolloutEngine, TeacherScorer
from megatron_mopd.rollout.sampler import Sampling
from megatron_mopd.store import TrajectoryStore
from megatron_mopd.teachers.lanes import Lane
from megatron_mopd.teachers.router import Router
from megatron_mopd.types import Cell


@dataclass(frozen=True)
class DriverParts:
    cells: tuple[Cell, ...]
    source: PromptSource
    renderer: Renderer
    engine: RolloutEngine
    sampling: Sampling
    router: Router
    scorer: TeacherScorer
    lanes: dict[str, Lane]
    store: TrajectoryStore


def driver_parts(config: Config) -> DriverParts:
    """What the driver needs: prompts, engine, teachers."""
    cells = config.prompts.cells
    renderer = Renderer(config.student.checkpoint, config.prompts.effort_variable)
    scorer = _scorer(config)
    return DriverParts(
        cells=cells,
        source=PromptSource(read_prompts(config.prompts.files), config.prompts, config.run.seed),
        renderer=renderer,
        engine=rollout_engine(config, config.student.checkpoint),
        sampling=None,
        router=Router(config.teachers.models, cells),
        scorer=scorer,
        lanes={t.name: Lane(t.name, scorer, config.teachers.batch_tokens) for t in config.teachers.models},
        store=TrajectoryStore(config.run.folder),
    )
