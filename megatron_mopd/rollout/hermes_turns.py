"""Turns in the style of Hermes and Qwen: see tool_calls.py. Thinking and calls need their tokens in the vocabulary.

Line breaks next to a marker are the template's, not the student's words.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megatron_mopd.rollout.turns import BadCall, ToolCall, Turn, read_call, read_json

THINK = ("<think>", "</think>")
CALL = ("<tool_call>", "</tool_call>")


class HermesTurns:
    """`end_ids` end a turn."""

    def __init__(self, tokenizer: Any, end_ids: frozenset[int]):
        self._tokenizer, self._end_ids = tokenizer, end_ids
        self._think, self._call = _pair(tokenizer, THINK), _pair(tokenizer, CALL)
        self.has_tools = self._call is not None

    def parse(self, token_ids: Sequence[int]) -> Turn:
        ids = list(token_ids)
        if ids and ids[-1] in self._end_ids:
            ids.pop()
        reasoning, rest, fault = self._reasoning(ids)
        begin = len(rest)
        if self._call is not None and self._call[0] in rest:
            begin = rest.index(self._call[0])
        calls, outside = self._calls(rest[begin:])
        content = self._text(rest[:begin]).strip("\n")
        if outside:
            fault = fault or "text follows the calls, or a call is closed that was not opened"
            content = "\n".join(filter(None, [content, *outside]))
        return Turn(reasoning, content, tuple(calls), fault)

    def _reasoning(self, ids: list[int]) -> tuple[str, list[int], str | None]:
        """Up to its end, whether the prompt or the student began it; and what follows."""
        if self._think is None:
            return "", ids, None
        begin, end = self._think
        opened = ids[:1] == [begin]
        if end not in ids:
            return ("", ids, "the thinking has no end") if opened else ("", ids, None)
        at = ids.index(end)
        thought = ids[opened:at]
        if begin in thought:
            return "", ids, "thinking begins inside thinking"
        return self._text(thought).strip("\n"), ids[at + 1 :], None

    def _calls(self, ids: list[int]) -> tuple[list[ToolCall | BadCall], list[str]]:
        """The calls, and what stands outside of them that is more than white space."""
        calls: list[ToolCall | BadCall] = []
        outside, at = [], 0
        while self._call is not None and at < len(ids):
            begin, end = self._call
            is_call = ids[at] == begin
            stop = next((k for k in range(at + 1, len(ids)) if ids[k] in (begin, end)), len(ids))
            is_closed = stop < len(ids) and ids[stop] == end
            text = self._text(ids[at + is_call : stop])
            if not is_call:
                outside.append(text)
            else:
                calls.append(_read(text) if is_closed else BadCall("the call is not closed", text))
            at = stop + (is_call and is_closed)
        return calls, [text.strip("\n") for text in outside if text.strip()]

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _read(text: str) -> ToolCall | BadCall:
    try:
        call = read_json(text)
    except ValueError as error:
        return BadCall(f"the call is no JSON: {error}", text)
    if not isinstance(call, dict):
        return BadCall("the call is not a JSON object with name and arguments", text)
    arguments = call.get("arguments")
    return read_call(call.get("name"), json.dumps(arguments, ensure_ascii=False), arguments, text)


def _pair(tokenizer: Any, marks: tuple[str, str]) -> tuple[int, int] | None:
    added = tokenizer.get_added_vocab()
    return (added[marks[0]], added[marks[1]]) if marks[0] in added and marks[1] in added else None
