"""Write the miniature's world into a folder, by seed:

python -m examples.k3_miniature.world runs/k3_miniature/world --seed 0

prompts/{eval,tuning,train}_{general,agents,coding}.jsonl   no task is in two of them
demonstrations/sft.jsonl                                    noisy, of random depth, as messages; none is evaluated
base/                                                       the quickstart's random Qwen3-MoE and tokenizer, with a
                                                            chat template that renders whole conversations
"""

from __future__ import annotations

import argparse
import json
import shutil
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy as np
from safetensors.numpy import save_file

from examples.k3_miniature.generators import Message, MiniatureTask, MiniatureTasks, to_turns
from examples.quickstart.tasks import DOMAINS, EFFORTS, STEP_WEIGHTS
from examples.quickstart.world import CONFIG, random_weights, write_tokenizer
from megatron_mopd.synthesis.contamination import HeldOut
from megatron_mopd.synthesis.splits import Split, draw_split, write_splits
from megatron_mopd.synthesis.task import Task

WEIGHTS = dict(enumerate(STEP_WEIGHTS, start=1))
SPLITS = (Split("eval", 2048, WEIGHTS), Split("tuning", 512, WEIGHTS), Split("train", 6144, WEIGHTS))
NUM_DEMONSTRATIONS = 12000
"""Of each domain."""
ERROR_RATE = 0.12
"""Of a demonstrated step."""
DEPTHS = {"low": (0, 2), "high": (0, 5), "max": (1, 6)}
"""Fewest and most steps of a demonstration. Each is as likely, so that the policy tries every length; a low depth
beyond 2 would beat the teacher of that effort."""
TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def write_world(folder: Path, seed: int) -> None:
    """Write everything; files that are there already are replaced."""
    for name in ("base", "demonstrations"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    generators = [MiniatureTasks(domain) for domain in DOMAINS]
    tasks = write_splits(folder / "prompts", generators, SPLITS, seed)
    write_base(folder / "base", seed)
    held_out = HeldOut()
    held_out.add(chain.from_iterable(t for name, t in tasks.items() if not name.startswith("train")))
    rows = [demonstrations(generator, held_out, seed) for generator in generators]
    lines = [json.dumps(row) + "\n" for row in chain.from_iterable(zip(*rows, strict=True))]
    (folder / "demonstrations" / "sft.jsonl").write_text("".join(lines))


def write_base(folder: Path, seed: int) -> None:
    write_tokenizer(folder)
    shutil.copyfile(TEMPLATE, folder / "chat_template.jinja")
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    save_file(random_weights(np.random.default_rng(seed)), folder / "model.safetensors", {"format": "pt"})


def demonstrations(generator: MiniatureTasks, held_out: HeldOut, seed: int) -> list[dict[str, Any]]:
    """Of the three efforts in turn."""
    domain, rng = generator.domain, Random(f"demonstrations {generator.domain} {seed}")
    tasks = draw_split(generator, Split("demonstrations", NUM_DEMONSTRATIONS, WEIGHTS), held_out, rng)
    rows = []
    for i, task in enumerate(tasks):
        effort = EFFORTS[i % len(EFFORTS)]
        messages = conversation(domain, task, rng.randint(*DEPTHS[effort]), ERROR_RATE, rng)
        rows.append({"id": f"{domain}-{i}", "domain": domain, "effort": effort, "messages": messages})
    return rows


def conversation(domain: str, task: Task, num_steps: int, error_rate: float, rng: Random) -> list[Message]:
    """The prompt's messages and the turns of a demonstration."""
    demonstration = cast(MiniatureTask, task).solvable.demonstrate(num_steps, error_rate, rng)
    return [*(dict(message) for message in task.messages), *to_turns(domain, demonstration)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_world(arguments.folder, arguments.seed)
