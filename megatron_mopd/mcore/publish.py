"""New weights to the rollout engine through a folder that trainer and engine both see.

Promise: the folder of the version that the engine may still read stays until the one after it is complete and in use,
so that a server that comes back can load it at any time.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch.distributed as dist

from megatron_mopd.mcore.learner import Learner


class FolderPublisher:
    """Writes RUN/weights/vXXXXXXXX, a Hugging Face folder, and keeps the last two."""

    def __init__(self, run_folder: Path):
        self._folder = run_folder / "weights"

    def publish(self, learner: Learner) -> str:
        """Export the learner's weights as the version of its step; return the folder. Collective."""
        version = learner.step
        learner.export(self._of(version))
        if dist.get_rank() == 0 and version >= 2:
            shutil.rmtree(self._of(version - 2), ignore_errors=True)
        return str(self._of(version))

    def _of(self, version: int) -> Path:
        return self._folder / f"v{version:08d}"
