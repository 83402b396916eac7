"""Text from outside that spells a special token stays text.

A tokenizer reads `<|im_end|>` as the token wherever it stands, in the page that a tool returned too. So what others
wrote is cut after the first character of everything that spells a token, with a character that no text has; the
template is rendered with it, and the pieces between the cuts are encoded one by one.

Promise (tests/unit/test_spelling.py): no token that the tokenizer was given beside its vocabulary comes from a message,
and what a message says is encoded in full.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from megatron_mopd.prompts.render import Renderer

CUT = "\ufdd0"
"""Unicode keeps it from ever being a character; text that has it all the same gets the one for what is none."""
NAMES = frozenset(
    [
        "role",
        "system",
        "user",
        "assistant",
        "tool",
        "content",
        "reasoning_content",
        "tool_calls",
        "tool_call_id",
        "id",
        "type",
        "function",
        "name",
        "arguments",
        "description",
        "parameters",
    ]
)


class Spelling:
    def __init__(self, renderer: Renderer):
        added = [token for token in renderer.tokenizer.get_added_vocab() if len(token) > 1]
        spelled = "|".join(re.escape(token) for token in added) or r"(?!)"
        self._begins = re.compile(rf"(?s)(?=(?:{spelled}))(.)")
        self._renderer = renderer

    def cut(self, value: Any) -> Any:
        """The value of JSON, with all its strings cut, but for the names that templates look for."""
        if isinstance(value, str):
            if value in NAMES:
                return value
            return self._begins.sub(rf"\1{CUT}", value.replace(CUT, "\ufffd"))
        if isinstance(value, dict):
            return {self.cut(key): self.cut(item) for key, item in value.items()}
        return [self.cut(item) for item in value] if isinstance(value, list | tuple) else value

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Of rendered text with cuts in it; each by itself."""
        pieces = [text.split(CUT) for text in texts]
        ids = iter(self._renderer.encode([piece for of_one in pieces for piece in of_one]))
        return [[token for _ in of_one for token in next(ids)] for of_one in pieces]
