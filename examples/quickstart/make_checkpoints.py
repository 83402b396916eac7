"""Make the checkpoints that multi-teacher distillation starts from, with the learner that later distils them:

    torchrun --nproc-per-node 2 -m examples.quickstart.make_checkpoints [a.b=c ...]

The SFT policy learns from demonstrations of all nine cells with all processes as data-parallel ranks. Each teacher then
goes on from the SFT policy with the demonstrations of its cell, on one process of its own: a step of so small a model
is mostly overhead, which data parallelism does not divide. Overrides lie over mopd.yaml, sft.yaml and teacher.yaml.

Promises: checkpoints that are there are left as they are, and one that is there is complete; a teacher does not depend
on the process that made it, nor on how many there are; rank 0 reports every checkpoint, and ends when all are there.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from megatron_mopd.cli import guarded
from megatron_mopd.config import Config, Teacher, load_config
from megatron_mopd.mcore import parallel
from megatron_mopd.mcore.layout import Layout
from megatron_mopd.mcore.learner import Learner
from megatron_mopd.ranks import rank, world_size
from megatron_mopd.store import StoredBatch
from megatron_mopd.types import Batch

HERE = Path(__file__).parent


def make_checkpoints(overrides: Sequence[str]) -> None:
    config = load_config([HERE / "mopd.yaml"], overrides)
    base, sft_policy = config.run.folder / "world" / "base", config.student.checkpoint
    demonstrations = config.run.folder / "world" / "demonstrations"
    teachers = [t for t in config.teachers.models if not t.checkpoint.is_dir()]
    my_rank, num_ranks = rank(), world_size()
    if not sft_policy.is_dir():
        learner = start(load_stage("sft.yaml", overrides, base))
        train(learner, demonstrations / "sft.safetensors")
        learner.export(sft_policy)
        parallel.shutdown()
        announce("SFT policy", my_rank)
    if not teachers:
        return
    work_alone()
    learner = start(load_stage("teacher.yaml", overrides, sft_policy))
    mine = share(teachers, demonstrations, num_ranks)[my_rank]
    for teacher in mine:
        learner.load_hf(sft_policy)
        train(learner, demonstrations / f"{teacher.name}.safetensors")
        learner.export(teacher.checkpoint)
        announce(f"teacher {teacher.name}", my_rank)
    parallel.shutdown()
    if my_rank == 0:
        for teacher in [t for t in teachers if t not in mine]:
            while not teacher.checkpoint.is_dir():  # torchrun ends this process if the one that makes it fails
                time.sleep(0.1)
            announce(f"teacher {teacher.name}", my_rank)


def load_stage(overlay: str, overrides: Sequence[str], start_from: Path) -> Config:
    return load_config([HERE / "mopd.yaml", HERE / overlay], [*overrides, f"student.checkpoint={start_from}"])


def start(config: Config) -> Learner:
    parallel.init_distributed(config.run.timeout_s)
    parallel.initialize_parallel(Layout.from_table(config.megatron), config.run.seed)
    return Learner(config)


def work_alone() -> None:
    """Leave torchrun's world: from here this process is rank 0 of 1."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)


def share(teachers: Sequence[Teacher], demonstrations: Path, num_ranks: int) -> list[list[Teacher]]:
    """Deal the teachers to the ranks, the one with most tokens first, each to the rank with fewest tokens so far."""
    tokens = {t.name: int(StoredBatch(demonstrations / f"{t.name}.safetensors").offsets[-1]) for t in teachers}
    shares: list[list[Teacher]] = [[] for _ in range(num_ranks)]
    for teacher in sorted(teachers, key=lambda t: -tokens[t.name]):
        min(shares, key=lambda mine: sum(tokens[t.name] for t in mine)).append(teacher)
    return shares


def train(learner: Learner, file: Path) -> None:
    """`run.num_steps` updates on demonstrations of `file`."""
    run, batch_size = learner.config.run, learner.config.prompts.batch_size
    for batch in demonstration_batches(StoredBatch(file), batch_size, run.num_steps, run.seed):
        learner.update(batch)


def demonstration_batches(pool: StoredBatch, batch_size: int, num_steps: int, seed: int) -> Iterator[Batch]:
    """Batches of rows in a seeded order; every row is drawn once before any is drawn again."""
    rng = np.random.default_rng([seed, len(pool)])
    rows = np.zeros(0, np.int64)
    for _ in range(num_steps):
        while len(rows) < batch_size:
            rows = np.concatenate([rows, rng.permutation(len(pool))])
        yield pool.select(rows[:batch_size].tolist())
        rows = rows[batch_size:]


def announce(what: str, my_rank: int) -> None:
    if my_rank == 0:
        print(f"made the {what}", flush=True)


if __name__ == "__main__":
    code = guarded(lambda: make_checkpoints(sys.argv[1:]), speak=rank() == 0)
    sys.stdout.flush()
    os._exit(code)
