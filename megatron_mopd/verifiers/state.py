"""State check: what an agent has left behind against the values that the label wants there.

    label: {"orders.17.status": "cancelled", "refunds.0.cents": 1250, "cart": null}

A path goes through mappings by key and through lists by index. Null: there must be nothing, or null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_mopd.types import Prompt


class StateCheck:
    """1.0 if the state has every value of the label; what the label does not name may be anything."""

    def check(self, prompt: Prompt) -> None:
        if not isinstance(prompt.label, Mapping) or not prompt.label:
            raise ValueError("it has no label: a table of paths and the values that are expected there")

    async def verify(self, prompt: Prompt, answer: Mapping[str, Any]) -> float:
        return float(all(same(at(answer, path), value) for path, value in prompt.label.items()))


def at(state: Any, path: str) -> Any:
    """What is there; None for nothing."""
    for part in path.split("."):
        if isinstance(state, Mapping):
            state = state.get(part)
        elif isinstance(state, Sequence) and not isinstance(state, str) and part.isdecimal() and int(part) < len(state):
            state = state[int(part)]
        else:
            return None
    return state


def same(found: Any, expected: Any) -> bool:
    """Equal, where a truth value is no number."""
    return isinstance(found, bool) == isinstance(expected, bool) and found == expected
