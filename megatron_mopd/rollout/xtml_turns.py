"""Turns in the project's own template: see tool_calls.py and prompts/xtml.jinja."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron_mopd.prompts.xtml import MARKERS
from megatron_mopd.rollout.turns import NAME, BadCall, ToolCall, Turn, read_call, read_json

CHANNELS = ("think", "response", "tools")
CALL = re.compile(rf'call name="({NAME.pattern})"')


class _Element(NamedTuple):
    name: str
    body: list[int]
    end: int
    """The place after it."""


class _Broken(Exception):
    """No element begins here; the message says what is wrong."""


class XtmlTurns:
    has_tools = True

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._open, self._sep, self._close, self._end = tokenizer.convert_tokens_to_ids(list(MARKERS))
        self._markers = {self._open, self._sep, self._close, self._end}

    def parse(self, token_ids: Sequence[int]) -> Turn:
        ids = list(token_ids)
        if ids and ids[-1] == self._end:
            ids.pop()
        said: dict[str, str] = {}
        calls, at, fault = (), 0, None
        try:
            while at < len(ids):
                element = self._element(ids, at)
                self._check_channel(element.name, (*said, *(["tools"] if calls else ())))
                if element.name == "tools":
                    calls = self._calls(element.body)
                else:
                    said[element.name] = self._plain(element.body)
                at = element.end
            if "think" not in said:
                fault = "there is no think channel; it is kept even when it is empty"
        except _Broken as error:
            fault = str(error)
        rest = self._text(ids[at:])
        content = said.get("response")
        return Turn(said.get("think", ""), (content or "") + rest if rest else content, calls, fault)

    def _check_channel(self, name: str, before: Sequence[str]) -> None:
        if name not in CHANNELS:
            raise _Broken("a channel is none of think, response and tools")
        if before and CHANNELS.index(name) <= CHANNELS.index(before[-1]):
            raise _Broken("channels come once each: think, response, tools")

    def _element(self, ids: list[int], at: int) -> _Element:
        """The one that begins there, with what is nested in it."""
        if ids[at] != self._open:
            raise _Broken("text stands outside of the channels")
        depth, sep = 0, None
        for k in range(at, len(ids)):
            if ids[k] == self._open:
                depth += 1
            elif ids[k] == self._sep:
                sep = k if sep is None else sep
            elif ids[k] == self._end:
                break
            elif ids[k] == self._close:
                depth -= 1
                if depth == 0:
                    if sep is None or self._markers & set(ids[at + 1 : sep]):
                        raise _Broken("a channel or call has no name")
                    return _Element(self._text(ids[at + 1 : sep]), ids[sep + 1 : k], k + 1)
        raise _Broken("a channel or call is not closed")

    def _plain(self, body: list[int]) -> str:
        if self._markers & set(body):
            raise _Broken("markers stand inside of a channel of text")
        return self._text(body)

    def _calls(self, body: list[int]) -> tuple[ToolCall | BadCall, ...]:
        calls: list[ToolCall | BadCall] = []
        at = 0
        if not body:
            raise _Broken("the tools channel is empty")
        while at < len(body):
            try:
                element = self._element(body, at)
            except _Broken as error:
                calls.append(BadCall(str(error), self._text(body[at:])))
                break
            calls.append(self._call(element, self._text(body[at : element.end])))
            at = element.end
        return tuple(calls)

    def _call(self, element: _Element, whole: str) -> ToolCall | BadCall:
        if not (header := CALL.fullmatch(element.name)):
            return BadCall('a call is written call name="..."', whole)
        if self._markers & set(element.body):
            return BadCall("markers stand inside of the arguments", whole)
        text = self._text(element.body)
        try:
            return read_call(header[1], text, read_json(text), whole)
        except ValueError as error:
            return BadCall(f"the arguments are no JSON: {error}", whole)

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
