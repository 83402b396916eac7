"""A second origin, the control of the same-origin gate: another base model, and a world's demonstrations in another
convention.

python -m examples.k3_miniature.second_origin runs/k3_miniature/world runs/k3_miniature/second_origin --seed 0

demonstrations/sft.jsonl   the same tasks and steps, said the other way round: a sum before its label, the comment of a
                           line behind its code. Calls have but one form
base/                      other random weights

What is learnt from it earns and spends as much, and is far from a student of the world.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from examples.k3_miniature.generators import Message
from examples.k3_miniature.world import write_base

BASE_SEED = 1 << 20
"""Added to the seed: no world has this base."""


def write_second_origin(world: Path, folder: Path, seed: int) -> None:
    """Files that are there already are replaced."""
    for name in ("base", "demonstrations"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    write_base(folder / "base", BASE_SEED + seed)
    rows = [json.loads(line) for line in (world / "demonstrations" / "sft.jsonl").read_text().splitlines()]
    for row in rows:
        row["messages"] = [said_otherwise(row["domain"], message) for message in row["messages"]]
    (folder / "demonstrations" / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def said_otherwise(domain: str, message: Message) -> Message:
    if message["role"] == "assistant" and domain == "general":
        return {**message, "reasoning_content": label_last(message["reasoning_content"], 2)}
    if message["role"] == "assistant" and domain == "coding":
        return {**message, "content": label_last(message["content"], 3)}
    return message


def label_last(text: str, words_per_step: int) -> str:
    """Example: label_last("A 1 B 4", 2) == "1 A 4 B" """
    words = text.split()
    steps = [words[at : at + words_per_step] for at in range(0, len(words), words_per_step)]
    return " ".join(word for label, *rest in steps for word in (*rest, label))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_second_origin(arguments.world, arguments.folder, arguments.seed)
