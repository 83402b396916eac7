"""What the ranks of a trainer do in the tests of weight sync: train a step, export it, broadcast it.

Megatron is imported inside the functions only: its CPU shim must not meet transformers in the test process. Ranks
remember the learner between calls, and make it again from the last export where the pool was started anew.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from tiny import VOCAB_SIZE

from megatron_mopd.batch import Batch
from megatron_mopd.config import Config
from megatron_mopd.types import Cell

SMALL_BUCKET_BYTES = 100_000
"""Of a model of 1.2 MB, so that every owner sends several."""
_TRAINERS: dict[str, Any] = {}


def batch_of(seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(6, 21, 6)
    total = int(lengths.sum())
    return Batch(
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        cell=np.zeros(6, np.int32),
        token_ids=rng.integers(0, VOCAB_SIZE, total).astype(np.int32),
        loss_mask=rng.random(total) < 0.8,
        rollout_logprobs=-rng.random(total).astype(np.float32) * 4,
        teacher_logprobs=-rng.random(total).astype(np.float32) * 12,
        weight_version=np.zeros(total, np.int32),
        cells=(Cell("d", "e0"),),
    )


class Trainer:
    def __init__(self, config: Config, step: int) -> None:
        from megatron_mopd.mcore.layout import Layout
        from megatron_mopd.mcore.learner import Learner
        from megatron_mopd.mcore.parallel import initialize_parallel
        from megatron_mopd.sglang.broadcast import Broadcaster

        initialize_parallel(Layout.from_table(config.megatron), seed=0)
        self.learner = Learner(config)
        self.learner.step = step
        self.broadcaster = Broadcaster(config, SMALL_BUCKET_BYTES)


def update(config: Config, step: int, source: Path, out: Path, broadcast: bool) -> None:
    """From the weights of `step - 1`, which are in `source`, to those of `step`, which go to `out` and the servers."""
    trainer = _TRAINERS.get("")
    if trainer is None or trainer.learner.step != step - 1:
        trainer = _TRAINERS[""] = Trainer(config, step - 1)
        trainer.learner.load_hf(source)
        trainer.learner.step = step - 1
    trainer.learner.update(batch_of(seed=step))
    trainer.learner.export(out)
    if broadcast:
        trainer.broadcaster.publish(trainer.learner)


def publish(config: Config, step: int, strike: tuple[int, int] | None = None) -> int:
    """Broadcast the checkpoint as version `step`; return how many servers were left out. `strike` (process group,
    signal) hits when rank 0 is about to send its third bucket."""
    import torch.distributed as dist

    from megatron_mopd.sglang.sender import Sender

    trainer = _TRAINERS.get("")
    if trainer is None:
        trainer = _TRAINERS[""] = Trainer(config, step)
    trainer.learner.step = step
    send, num_sent = Sender.send, 0

    def send_and_strike(self: Sender, bucket: Any) -> None:
        nonlocal num_sent
        num_sent += 1
        if strike is not None and num_sent == 3 and dist.get_rank() == 0:
            os.killpg(*strike)
        send(self, bucket)

    Sender.send = send_and_strike
    try:
        trainer.broadcaster.publish(trainer.learner)
    finally:
        Sender.send = send
    return trainer.broadcaster.num_left_out


def finish() -> None:
    """Leave the servers' groups, and forget the learner."""
    if trainer := _TRAINERS.pop("", None):
        trainer.broadcaster.close()


def refusal(config: Config) -> str:
    """What a broadcast to these servers is refused with."""
    from megatron_mopd.errors import UserError

    try:
        publish(config, step=1)
    except UserError as error:
        return str(error)
    finally:
        finish()
    return ""
