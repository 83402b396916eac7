"""The small run of the end-to-end tests: the quickstart's world, random teachers, 36 trajectories a step."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from examples.quickstart.world import CELLS, write_world
from megatron_mopd.telemetry.record import read_record

ROOT = Path(__file__).parents[1]


def write_worlds(folder: Path) -> None:
    """Of different seeds: `one/base` is the student, `other/base` teaches every cell."""
    write_world(folder / "one", seed=1)
    write_world(folder / "other", seed=2)


def write_overlay(world: Path) -> Path:
    """The quickstart's configuration on this world."""
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


def metrics(run_folder: Path) -> list[dict[str, Any]]:
    return [row["metrics"] for row in read_record(run_folder)]


def wait_for_step(process: subprocess.Popen[str], run_folder: Path, step: int, timeout_s: float = 180) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        if (run_folder / "metrics.jsonl").exists() and len(read_record(run_folder)) >= step:
            return
        time.sleep(0.05)
    raise AssertionError(f"step {step} not reached in {timeout_s} s")


def processes_of(run_folder: Path) -> dict[int, list[str]]:
    """pid -> command line of the processes on this machine that name the run folder."""
    found = {}
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = cmdline.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has just ended
            continue
        if any(str(run_folder) in word for word in words):
            found[int(cmdline.parent.name)] = words
    return found


def assert_nothing_left(run_folder: Path, within_s: float = 20) -> None:
    deadline = time.monotonic() + within_s
    while processes_of(run_folder) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not processes_of(run_folder)
