"""A turn of the student as data, and how JSON that it wrote is read. Who reads it from tokens: tool_calls.py."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""Of a function: what OpenAI's interface allows, and the dots of Kimi's."""


@dataclass(frozen=True)
class ToolCall:
    """`text` is the JSON of the arguments as it was sampled."""

    name: str
    arguments: Mapping[str, Any]
    text: str


@dataclass(frozen=True)
class BadCall:
    """`text` is all that stood between the markers of the call."""

    reason: str
    text: str


@dataclass(frozen=True)
class Turn:
    """`content` None: nothing was said beside thinking and calls, where the way of writing tells this from ""."""

    reasoning: str = ""
    content: str | None = None
    calls: tuple[ToolCall | BadCall, ...] = ()
    fault: str | None = None
    """Why the turn is not as it should be written; what is wrong is in `content`, markers and all."""

    @property
    def bad_calls(self) -> tuple[BadCall, ...]:
        return tuple(call for call in self.calls if isinstance(call, BadCall))


class TurnParser(Protocol):
    has_tools: bool

    def parse(self, token_ids: Sequence[int]) -> Turn:
        """Of the sampled tokens, with or without the one that ends the turn."""
        ...


def read_call(name: object, text: str, arguments: object, whole: str) -> ToolCall | BadCall:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        return BadCall("the name of the function is missing, or not of letters, digits, _, . and -", whole)
    if not isinstance(arguments, dict):
        return BadCall("the arguments are not a JSON object", whole)
    return ToolCall(name, arguments, text)


def read_json(text: str) -> Any:
    """Raises ValueError for what is no JSON, or none that every other program reads."""
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def _no_constant(word: str) -> float:
    raise ValueError(f"{word} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError("a number is too large")
    return value
