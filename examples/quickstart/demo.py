"""`make demo`: the whole of multi-teacher on-policy distillation on this machine, in minutes.

    python -m examples.quickstart.demo [seed=0]

    1 world        prompts, tokenizer, a random Qwen3-MoE               examples/quickstart/world.py
    2 checkpoints  the SFT policy and its nine teachers                 examples/quickstart/make_checkpoints.py
    3 train        nine teachers into one student                       mopd train examples/quickstart/mopd.yaml
    4 eval         the 3 x 3 table, summary.json, report.html           mopd eval, mopd report

Each stage is a command that a user would type. A second call goes on where the first one stopped; another seed
moves the run of the old one aside.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from megatron_mopd import cli
from megatron_mopd.config import load_config
from megatron_mopd.errors import UserError

CONFIG = "examples/quickstart/mopd.yaml"
STAGES = ("world", "SFT policy and nine teachers", "nine teachers into one student", "evaluation")


def main() -> None:
    sys.exit(cli.guarded(lambda: demo(parse_seed(sys.argv[1:]))))


def parse_seed(words: list[str]) -> int:
    if not words:
        return 0
    name, _, value = words[0].partition("=")
    if len(words) > 1 or name != "seed" or not value.isdigit():
        raise UserError(f"unknown argument {words[-1]!r}; the demo takes seed=N")
    return int(value)


def demo(seed: int) -> int:
    start = time.monotonic()
    folder = load_config([CONFIG]).run.folder
    make_room(folder, seed)
    overrides = [f"run.seed={seed}"]
    stages: list[Callable[[], int]] = [
        lambda: python("examples.quickstart.world", str(folder / "world"), "--seed", str(seed)),
        lambda: python("examples.quickstart.make_checkpoints", CONFIG, *overrides),
        lambda: mopd("train", CONFIG, *overrides),
        lambda: mopd("eval", CONFIG, *overrides),
    ]
    console = Console()
    for number, (name, stage) in enumerate(zip(STAGES, stages, strict=True), start=1):
        console.rule(f"[bold]{number} of {len(stages)}: {name}", align="left")
        if code := stage():
            return code
    mopd("report", str(folder))
    console.print(f"done in {time.monotonic() - start:.0f} s: {folder}/summary.json, {folder}/report.html")
    return 0


def make_room(folder: Path, seed: int) -> None:
    """Move a run of another seed aside."""
    stamp = folder / "seed"
    old = stamp.read_text().strip() if stamp.is_file() else None
    if old is not None and old != str(seed):
        aside = folder.with_name(f"{folder.name}-seed{old}")
        if aside.exists():
            raise UserError(f"{folder} holds the run of seed {old}, and so does {aside}; remove one of them")
        folder.rename(aside)
    folder.mkdir(parents=True, exist_ok=True)
    stamp.write_text(f"{seed}\n")


def python(module: str, *words: str) -> int:
    return subprocess.run([sys.executable, "-m", module, *words], check=False).returncode


def mopd(*words: str) -> int:
    return python("megatron_mopd.cli", *words)


if __name__ == "__main__":
    main()
