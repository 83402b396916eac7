"""New weights to the rollout engine through a folder that trainer and engine both see.

Promise: the folder of the version that the engine may still read stays until the one after it is complete and in use,
so that a server that comes back can load it at any time.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch.distributed as dist

from megatron_mopd.mcore.learner import Learner


class NoEngine:
    """Nobody samples from what is trained, so nobody is told of its weights."""

    def publish(self, learner: Learner) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to leave."""


class FolderPublisher:
    """Writes RUN/weights/vXXXXXXXX, a Hugging Face folder, and keeps the version before it."""

    def __init__(self, run_folder: Path):
        self._folder = run_folder / "weights"

    def publish(self, learner: Learner) -> str:
        """Export the learner's weights as the version of its step; return the folder. Collective."""
        folder = self._of(learner.step)
        learner.export(folder)
        if dist.get_rank() == 0:
            for other in self._folder.glob("v*"):  # also newer ones, of a run that has gone back to a checkpoint
                if other not in (folder, self._of(learner.step - 1)):
                    shutil.rmtree(other)
        return str(folder)

    def close(self) -> None:
        """The folders stay."""

    def _of(self, version: int) -> Path:
        return self._folder / f"v{version:08d}"
