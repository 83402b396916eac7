"""The trainer's loop, run by every torchrun rank: next batch, update, export the weights, save.

    torchrun --nproc-per-node 2 -m megatron_mopd.train CONFIG [a.b=c ...]

Promises: step k trains on what the weights of version k sampled (synchronous, on-policy); save, kill and resume at
the same layout gives bitwise what never stopping gives; a failure of one part ends the run with its reason, never
with a hang.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from megatron_mopd import build
from megatron_mopd.cli import run_rank
from megatron_mopd.config import Config
from megatron_mopd.errors import UserError
from megatron_mopd.link import StepRequest
from megatron_mopd.preflight import preflight
from megatron_mopd.ranks import rank, world_size
from megatron_mopd.store import StoredBatch


class Trainer:
    def __init__(self, parts: build.TrainerParts) -> None:
        self.parts, self.learner, self.config = parts, parts.learner, parts.config
        self.seconds: dict[str, float] = {}
        self.saved_step = self.learner.step

    def run(self) -> None:
        """Train to `run.num_steps` updates, then leave the student as a Hugging Face folder in RUN/student."""
        self.publish_weights()
        while self.learner.step < self.config.run.num_steps:
            start = time.monotonic()
            batch = self.timed("wait", self.next_batch_or_save)  # 1 DRAW, 2 SAMPLE, 3 ROUTE, 4 SCORE
            metrics = self.timed("update", lambda batch=batch: self.learner.update(batch))  # 5 UPDATE
            self.timed("sync", self.publish_weights)  # and resample from the updated student
            self.seconds["step"] = time.monotonic() - start
            self.parts.report(metrics, self.seconds)
            if metrics.step % self.config.run.save_every_steps == 0 or metrics.step == self.config.run.num_steps:
                self.save()
        self.learner.export(self.config.run.folder / "student")

    def next_batch(self) -> StoredBatch:
        """The batch that the driver made of the weights just published."""
        step = self.learner.step
        self.parts.request_batch(StepRequest(step, self.weights, weight_version=step))
        return self.parts.store.read(step)

    def next_batch_or_save(self) -> StoredBatch:
        """Where the driver gives up (a teacher stays away, say) the run ends with the weights for which the batch was
        sampled saved: it goes on from this very step."""
        try:
            return self.next_batch()
        except (UserError, SystemExit):  # the former on rank 0, the latter on the others
            if self.learner.step > self.saved_step:
                self.save()
            raise

    def save(self) -> None:
        self.parts.save()
        self.saved_step = self.learner.step

    def publish_weights(self) -> None:
        """Hand the weights of this version to the rollout engine, or say in which folder it finds them."""
        self.weights = self.parts.publisher.publish(self.learner)

    def timed(self, name: str, part: Callable[[], Any]) -> Any:
        start = time.monotonic()
        with self.parts.trace.span(name, "step", step=self.learner.step):
            result = part()
        self.seconds[name] = time.monotonic() - start
        return result


def train(config: Config) -> None:
    if rank() == 0:
        preflight(config, world_size())
    with build.trainer_parts(config) as parts:
        Trainer(parts).run()


if __name__ == "__main__":
    run_rank(train)
