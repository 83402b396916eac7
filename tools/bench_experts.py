"""What MXFP4 experts cost: the share of a step's training side that is spent on their values, in one run.

    python tools/bench_experts.py [--rounds 5] [--rows 864]

The quickstart's student is updated with batches of its size and exported after each, on one process. Measured is the
processor time of making quantized values, in the forward pass and for the rollout engine, against that of the update
and the export as a whole. Sampling and scoring, which make a step longer, are left out: the share of a whole step is
smaller.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from examples.quickstart.world import write_world
from megatron_mopd.batch import Batch
from megatron_mopd.cli import guarded
from megatron_mopd.config import Config, load_config
from megatron_mopd.types import Cell

QUICKSTART = Path(__file__).parents[1] / "examples/quickstart/mopd.yaml"
PROMPT_TOKENS, RESPONSE_TOKENS = 16, (5, 24)
"""About those of the quickstart's prompts and answers."""


class Clock:
    """Adds up the processor time of calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.process_time()
            try:
                return method(*args)
            finally:
                self.seconds += time.process_time() - start

        return timed


def batch_of(rows: int, vocab_size: int, seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    responses = rng.integers(*RESPONSE_TOKENS, rows, endpoint=True)
    offsets = np.concatenate([[0], np.cumsum(responses + PROMPT_TOKENS)]).astype(np.int64)
    total = int(offsets[-1])
    position = np.arange(total) - np.repeat(offsets[:-1], responses + PROMPT_TOKENS)
    return Batch(
        offsets=offsets,
        cell=np.zeros(rows, np.int32),
        token_ids=rng.integers(0, vocab_size, total).astype(np.int32),
        loss_mask=position >= PROMPT_TOKENS,
        rollout_logprobs=-rng.random(total).astype(np.float32),
        teacher_logprobs=-rng.random(total).astype(np.float32),
        weight_version=np.zeros(total, np.int32),
        cells=(Cell("general", "low"),),
    )


def bench(rounds: int, rows: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_world(Path(folder), seed=0)
        single = ("tensor_model_parallel_size=1", "expert_model_parallel_size=1")
        words = [f"student.checkpoint={folder}/base", "quantization.experts=mxfp4", *(f"megatron.{x}" for x in single)]
        shares = measure(load_config([QUICKSTART], words), Path(folder) / "out", rounds, rows)
    print(f"quantized values: {statistics.median(shares):.1%} of update and export, median of {rounds} rounds")
    print("each round: " + ", ".join(f"{share:.1%}" for share in shares))


def measure(config: Config, out: Path, rounds: int, rows: int) -> list[float]:
    import torch

    from megatron_mopd.mcore import parallel
    from megatron_mopd.mcore.layout import Layout
    from megatron_mopd.mcore.learner import Learner

    torch.set_num_threads(1)
    parallel.init_distributed(config.run.timeout_s)
    parallel.initialize_parallel(Layout.from_table(config.megatron), config.run.seed)
    learner, clock, shares = Learner(config), Clock(), []
    experts: Any = learner.experts
    experts._on_grid, experts.value_of = clock.around(experts._on_grid), clock.around(experts.value_of)
    for i in range(rounds + 1):  # the first is a warm-up
        batch, clock.seconds = batch_of(rows, learner.vocab_size, i), 0.0
        start = time.process_time()
        learner.update(batch)
        learner.export(out)
        shares.append(clock.seconds / (time.process_time() - start))
    parallel.shutdown()
    return shares[1:]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=864)
    arguments = parser.parse_args()
    sys.exit(guarded(lambda: bench(arguments.rounds, arguments.rows)))
