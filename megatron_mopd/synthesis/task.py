"""What a generator of tasks draws. Torch-free, and everything follows from the `random.Random` that is passed in."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol


@dataclass(frozen=True)
class Task:
    """A prompt without an id: what the student reads, and what its environment judges by.

    Example: Task(({"role": "user", "content": "1 + 1"},), label="2", difficulty=1)
    """

    messages: tuple[Mapping[str, Any], ...]
    label: Any
    difficulty: int
    metadata: Mapping[str, Any] = field(default_factory=dict)
    budget_tokens: float | None = None
    question: str | None = None
    """What is asked, where other words round it ask the same: held out with some, it is held out with any. None: only
    the words say."""

    @property
    def text(self) -> str:
        """What makes it this task and no other: its messages, and what else its environment knows. Two tasks of the
        same words are the same, whatever their white space and case."""
        contents = [str(message.get("content", "")) for message in self.messages]
        hidden = [json.dumps(self.metadata, sort_keys=True)] if self.metadata else []
        return " ".join(" ".join([*contents, *hidden]).lower().split())


class Generator(Protocol):
    """Tasks of one domain for one environment."""

    domain: str
    environment: str

    @property
    def difficulties(self) -> Sequence[int]:
        """Those that `draw` takes, from easy to hard."""
        ...

    def draw(self, difficulty: int, rng: Random) -> Task: ...
