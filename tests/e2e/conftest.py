"""A small run of the whole machine: the quickstart's world, random teachers, a few steps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from examples.quickstart.world import CELLS, write_world

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two worlds of different seeds: `one/base` is the student, `other/base` teaches every cell."""
    folder = tmp_path_factory.mktemp("world")
    write_world(folder / "one", seed=1)
    write_world(folder / "other", seed=2)
    return folder


@pytest.fixture(scope="session")
def overlay(world: Path) -> Path:
    """The quickstart's configuration on this world, at 36 trajectories a step."""
    models = [
        {
            "name": f"{c.domain}-{c.effort}",
            "domain": c.domain,
            "effort": c.effort,
            "checkpoint": str(world / "other" / "base"),
        }
        for c in CELLS
    ]
    prompts = world / "one" / "prompts"
    domains = ("general", "agents", "coding")
    tree = {
        "run": {"num_steps": 4, "save_every_steps": 2},
        "student": {"checkpoint": str(world / "one" / "base")},
        "teachers": {"models": models},
        "prompts": {
            "files": [str(prompts / f"{d}.jsonl") for d in domains],
            "eval_files": [str(prompts / f"eval_{d}.jsonl") for d in domains],
            "batch_size": 36,
        },
        "evaluation": {"prompts_per_cell": 8},
        "megatron": {"lr": 1e-2, "lr_warmup_steps": 0, "lr_decay_style": "constant"},
    }
    file = world / "overlay.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


class Mopd:
    """`mopd` and torchrun as a user calls them, on the small configuration."""

    def __init__(self, overlay: Path) -> None:
        self.config = [str(ROOT / "examples/quickstart/mopd.yaml"), str(overlay)]

    def __call__(self, command: str, *overrides: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
        process = self.start(command, *overrides)
        out, err = process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def start(self, command: str, *overrides: str) -> subprocess.Popen[str]:
        return self._popen([sys.executable, "-m", "megatron_mopd.cli", command, *self.config, *overrides])

    def torchrun(self, num_processes: int, *overrides: str) -> subprocess.Popen[str]:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
        return self._popen([sys.executable, *torchrun, "-m", "megatron_mopd.train", *self.config, *overrides])

    def _popen(self, words: list[str]) -> subprocess.Popen[str]:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
        return subprocess.Popen(
            words, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )


@pytest.fixture(scope="session")
def mopd(overlay: Path) -> Mopd:
    return Mopd(overlay)


@pytest.fixture(scope="session")
def undisturbed(mopd: Mopd, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of four steps at TP2 x EP2 without an interruption."""
    run_folder = tmp_path_factory.mktemp("undisturbed") / "run"
    result = mopd("train", f"run.folder={run_folder}")
    assert result.returncode == 0, result.stderr
    return run_folder
