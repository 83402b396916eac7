"""Prompt files for training, tuning and evaluation that have no task in common.

    FOLDER/eval_general.jsonl, tuning_general.jsonl, train_general.jsonl ...

Sets are filled in the order in which they are given, and each must be clean of those before it: put the evaluation
first, and the training set is what gives way. A draw that is contaminated, or already in its own set, is drawn again at
the same difficulty, so no decontamination changes how hard a set is.

Promises (tests/unit/test_synthesis.py): the same seed writes the same bytes; a set's draws do not depend on the other
domains; difficulties are met exactly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from megatron_mopd.errors import UserError
from megatron_mopd.synthesis.contamination import HeldOut
from megatron_mopd.synthesis.difficulty import counts
from megatron_mopd.synthesis.task import Generator, Task

MAX_REDRAWS = 200


@dataclass(frozen=True)
class Split:
    """A set of prompts of each domain."""

    name: str
    num_tasks: int
    weights: Mapping[int, float]
    """Difficulty to weight; see difficulty.py."""


@dataclass(frozen=True)
class Decontamination:
    """See contamination.py."""

    ngram_words: int = 13
    max_share: float = 0.5


def write_splits(
    folder: Path | str,
    generators: Sequence[Generator],
    splits: Sequence[Split],
    seed: int,
    rule: Decontamination = Decontamination(),
) -> dict[str, list[Task]]:
    """Write `folder`/<split>_<domain>.jsonl for every generator; return the tasks by the name of the file without its
    ending."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written: dict[str, list[Task]] = {}
    for generator in generators:
        held_out = HeldOut(rule.ngram_words, rule.max_share)
        for split in splits:
            name = f"{split.name}_{generator.domain}"
            tasks = draw_split(generator, split, held_out, Random(f"{name} {seed}"))
            held_out.add(tasks)
            lines = [json.dumps(to_line(f"{name}-{i}", generator, task)) + "\n" for i, task in enumerate(tasks)]
            (folder / f"{name}.jsonl").write_text("".join(lines))
            written[name] = tasks
    return written


def draw_split(generator: Generator, split: Split, held_out: HeldOut, rng: Random) -> list[Task]:
    """Different tasks, clean of what is held out, in random order."""
    unknown = set(split.weights) - set(generator.difficulties)
    if unknown:
        raise UserError(
            f"split {split.name}: {generator.domain} has no difficulty {min(unknown)}; it has "
            f"{', '.join(map(str, generator.difficulties))}"
        )
    tasks: dict[str, Task] = {}
    for difficulty, num_tasks in counts(split.weights, split.num_tasks).items():
        for _ in range(num_tasks):
            task = _new_task(generator, difficulty, tasks, held_out, rng, split.name)
            tasks[task.text] = task
    drawn = list(tasks.values())
    rng.shuffle(drawn)
    return drawn


def _new_task(
    generator: Generator, difficulty: int, tasks: Mapping[str, Task], held_out: HeldOut, rng: Random, split: str
) -> Task:
    for _ in range(MAX_REDRAWS):
        task = generator.draw(difficulty, rng)
        if task.text not in tasks and not held_out.is_contaminated(task):
            return task
    raise UserError(
        f"split {split}: {generator.domain} has too few different tasks of difficulty {difficulty}: {MAX_REDRAWS} "
        f"draws in a row were in it or in a split before it; ask for fewer than {len(tasks)}, or loosen the "
        "decontamination"
    )


def to_line(task_id: str, generator: Generator, task: Task) -> dict[str, Any]:
    """A line of a prompt file (prompts/files.py)."""
    line = {
        "id": task_id,
        "domain": generator.domain,
        "environment": generator.environment,
        "messages": list(task.messages),
        "label": task.label,
        "metadata": {**task.metadata, "difficulty": task.difficulty},
    }
    return line if task.budget_tokens is None else {**line, "budget_tokens": task.budget_tokens}
