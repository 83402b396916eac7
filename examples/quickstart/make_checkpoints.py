"""Make the checkpoints that multi-teacher distillation starts from, with the learner that later distils them:

    python -m examples.quickstart.make_checkpoints CONFIG [a.b=c ...]

It starts `launch.num_processes` ranks; under torchrun, torchrun decides. The SFT policy learns from demonstrations of
all nine cells with all processes as data-parallel ranks. Each teacher then goes on from the SFT policy with the
demonstrations of its cell, on one process of its own: a step of so small a model is mostly overhead, which data
parallelism does not divide. sft.yaml and teacher.yaml overlay CONFIG.

Promises: checkpoints that are there are left as they are, and one that is there is complete; a teacher does not depend
on the process that made it, nor on how many there are; rank 0 reports every checkpoint, and ends when all are there.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_mopd.batch import Batch
from megatron_mopd.cli import guarded, read_config
from megatron_mopd.config import Config, Teacher, load_config, split_arguments
from megatron_mopd.ranks import rank, world_size
from megatron_mopd.store import StoredBatch

if TYPE_CHECKING:
    from megatron_mopd.mcore.learner import Learner

HERE = Path(__file__).parent


def main(words: list[str]) -> int:
    config = read_config(words)
    if config is None:
        return 0
    if "RANK" not in os.environ:
        from megatron_mopd.launch import launch

        return launch("examples.quickstart.make_checkpoints", words, config.launch.num_processes, config.run.folder)
    make_checkpoints(config, *split_arguments(words))
    return 0


def make_checkpoints(config: Config, files: Sequence[str], overrides: Sequence[str]) -> None:
    from megatron_mopd.mcore import parallel

    world, sft_policy = config.run.folder / "world", config.student.checkpoint
    shares = share(config.teachers.models, world / "demonstrations", world_size())
    my_rank = rank()
    if not sft_policy.is_dir():
        announce("SFT policy: training, for a minute or two", my_rank)
        learner = start(stage_config(files, "sft.yaml", overrides, world / "base"))
        train(learner, world / "demonstrations" / "sft.safetensors")
        learner.export(sft_policy)
        parallel.shutdown()
    announce("SFT policy: ready", my_rank)
    for teacher in shares[my_rank]:
        if teacher.checkpoint.is_dir():
            announce(f"teacher {teacher.name}: ready", my_rank)
    if missing := [t for t in shares[my_rank] if not t.checkpoint.is_dir()]:
        work_alone()
        learner = start(stage_config(files, "teacher.yaml", overrides, sft_policy))
        for teacher in missing:
            learner.load_hf(sft_policy)
            train(learner, world / "demonstrations" / f"{teacher.name}.safetensors")
            learner.export(teacher.checkpoint)
            announce(f"teacher {teacher.name}: ready", my_rank)
        parallel.shutdown()
    if my_rank == 0:
        for teacher in itertools.chain(*shares[1:]):
            while not teacher.checkpoint.is_dir():  # torchrun ends this process if the one that makes it fails
                time.sleep(0.1)
            announce(f"teacher {teacher.name}: ready", my_rank)


def stage_config(files: Sequence[str], overlay: str, overrides: Sequence[str], start_from: Path) -> Config:
    return load_config([*files, HERE / overlay], [*overrides, f"student.checkpoint={start_from}"])


def start(config: Config) -> Learner:
    from megatron_mopd.mcore import parallel
    from megatron_mopd.mcore.layout import Layout
    from megatron_mopd.mcore.learner import Learner

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
        print(what, flush=True)


if __name__ == "__main__":
    code = guarded(lambda: main(sys.argv[1:]), rank())
    sys.stdout.flush()
    os._exit(code)
