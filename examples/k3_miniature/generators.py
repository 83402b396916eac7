"""The three kinds of tasks of the quickstart as generators of task synthesis, and their solutions as messages.

Difficulty is the number of steps that a task takes, 1 to 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from examples.quickstart import tasks
from examples.quickstart.tasks import ANSWER, STEP_WEIGHTS, TASKS, Demonstration
from examples.quickstart.world import BUDGET_TOKENS, ENVIRONMENTS, to_messages
from megatron_mopd.synthesis.task import Task

Message = dict[str, Any]


@dataclass(frozen=True)
class MiniatureTask(Task):
    solvable: tasks.Task = field(kw_only=True)
    """What can demonstrate its solution."""


class MiniatureTasks:
    """The tasks of one domain."""

    def __init__(self, domain: str) -> None:
        self.domain, self.environment = domain, ENVIRONMENTS[domain]
        self.difficulties = tuple(range(1, len(STEP_WEIGHTS) + 1))

    def draw(self, difficulty: int, rng: Random) -> MiniatureTask:
        only = [float(difficulty == steps) for steps in self.difficulties]
        task = TASKS[self.domain].draw(rng, only)
        return MiniatureTask(
            messages=tuple(to_messages(self.domain, task)),
            label=label_of(self.domain, task),
            difficulty=difficulty,
            metadata=task.metadata,
            budget_tokens=BUDGET_TOKENS[self.domain],
            solvable=task,
        )


def label_of(domain: str, task: tasks.Task) -> Any:
    """What the verifier of the domain compares with: an answer, a state, or tests of [stdin, stdout]."""
    if domain == "agents":
        return {"submitted": task.label}
    if domain == "coding":
        return [[str(value), str(expected)] for value, expected in task.label]
    return task.label


def to_turns(domain: str, demonstration: Demonstration) -> list[Message]:
    """The assistant's and the tool's messages of a demonstration; the chat template renders them to its words."""
    words = demonstration.words[:-1]  # the template ends the last turn
    if domain == "coding":
        return [{"role": "assistant", "content": " ".join(words)}]
    thinking, answer = words[: words.index(ANSWER)], " ".join(words[words.index(ANSWER) + 1 :])
    if domain == "agents":
        return [*_calls(thinking), {"role": "assistant", "content": answer}]
    return [{"role": "assistant", "reasoning_content": " ".join(thinking), "content": answer}]


def _calls(words: Sequence[str]) -> list[Message]:
    turns: list[Message] = []
    for _, key, value in zip(words[::3], words[1::3], words[2::3], strict=True):
        call = {"type": "function", "function": {"name": "look_up", "arguments": {"key": key}}}
        turns.append({"role": "assistant", "content": "", "tool_calls": [call]})
        turns.append({"role": "tool", "content": value})
    return turns
