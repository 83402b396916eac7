"""The trainer's loop, run by every torchrun rank: next batch, update, export the weights, save.

    torchrun --nproc-per-node 2 -m megatron_mopd.train CONFIG [a.b=c ...]

Promise: step k samples from the weights of version k (synchronous, on-policy); save, kill and resume at the same layout gives
bitwise what never stopping gives.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

from megatron_mopd import build
from megatron_mopd.config import Config, load_config, split_arguments
from megatron_mopd.link import StepRequest
from megatron_mopd.types import StepMetrics


class Trainer:
    def __init__(self, parts: build.TrainerParts) -> None:
        self.parts = parts
        self.seconds: dict[str, float] = {}

    def run(self, num_steps: int) -> None:
        """Train up to `num_steps` updates in all, then leave the student as a Hugging Face folder in RUN/student."""
        p = self.parts
        self.publish()
        while p.learner.step < num_steps:
            batch = self.next_batch()
            metrics = self.timed("update", p.learner.update, batch)  # 5 UPDATE
            self.timed("sync", self.publish)  # and resample from the updated student
            self.record(metrics)
            if p.learner.step % p.config.run.save_every_steps == 0 or p.learner.step == num_steps:
                p.checkpoints.save(p.learner)
        p.learner.export(p.config.run.folder / "student")

    def next_batch(self):
        """DRAW, SAMPLE, ROUTE and SCORE of this step, made by the driver from the weights just published."""
        p, step = self.parts, self.parts.learner.step
        request = StepRequest(step, str(self.weights(step)), weight_version=step)
        self.timed("wait", p.agree, lambda: p.driver and p.driver.request(request))
        return p.store.read(step)

    def publish(self) -> None:
        """Export the weights of this version for the rollout engine and drop the version before."""
        p, version = self.parts, self.parts.learner.step
        p.learner.export(self.weights(version))
        if p.driver and version:
            shutil.rmtree(self.weights(version - 1), ignore_errors=True)

    def weights(self, version: int) -> Path:
        return self.parts.config.run.folder / "weights" / f"v{version:08d}"
