"""The body of POST /v1/chat/completions as data. Whatever is no such request is Refused, with OpenAI's names.

What would change how the student samples (temperature, penalties, a seed, ...) may be left out, null, or what it is
anyway; it is never ignored. Promise (tests/unit/test_chat_request.py): any bytes give a ChatRequest or Refused.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import orjson

from megatron_mopd.rollout.turns import NAME, read_json

ROLES = ("system", "user", "assistant", "tool")
WITHOUT_EFFECT = ("user", "metadata", "safety_identifier", "prompt_cache_key", "store")
FIXED: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "stop": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "seed": (),
}
READ = ("model", "messages", "tools", "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature")
READ = (*READ, "top_p", "reasoning_effort")
SHOWN = 80
"""Characters of a name that is said as it is."""
MESSAGE_KEYS = ("role", "content", "reasoning_content", "reasoning", "tool_calls", "tool_call_id", "name")


class Refused(Exception):
    """`status` is HTTP's; `code` and `param` are the fields of OpenAI's errors."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param


@dataclass(frozen=True)
class Call:
    id: str
    name: str
    arguments: str
    """JSON text of an object."""


@dataclass(frozen=True)
class Message:
    role: str
    content: str | None
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    def for_template(self, arguments_as_text: bool) -> dict[str, Any]:
        """As chat templates expect it."""
        row: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.role == "assistant":
            row["reasoning_content"] = self.reasoning
        if self.calls:
            row["tool_calls"] = [_call_row(call, arguments_as_text) for call in self.calls]
        optional = {"tool_call_id": self.tool_call_id, "name": self.name}
        return row | {key: value for key, value in optional.items() if value is not None}


@dataclass(frozen=True)
class ChatRequest:
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    model: str = ""
    max_tokens: int | None = None
    stream: bool = False
    with_usage: bool = False
    temperature: float | None = None
    top_p: float | None = None
    effort: str | None = None


def read_request(body: bytes) -> ChatRequest:
    try:
        row = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Refused(400, f"the body is no JSON: {error}") from None
    if not isinstance(row, dict):
        raise _bad("it must be an object", "body")
    _check_options(row)
    most = [row[key] for key in ("max_completion_tokens", "max_tokens") if row.get(key) is not None]
    if any(type(value) is not int or value < 1 for value in most):
        raise _bad("it must be a whole number above 0", "max_tokens")
    options = row.get("stream_options") or {}
    if not isinstance(options, dict) or not isinstance(options.get("include_usage", False), bool):
        raise _bad("it must be an object with include_usage, true or false", "stream_options")
    return ChatRequest(
        messages=_messages(row.get("messages")),
        tools=_tools(row.get("tools")),
        model=_typed(row, "model", str, ""),
        max_tokens=min(most, default=None),
        stream=_typed(row, "stream", bool, False),
        with_usage=options.get("include_usage", False),
        temperature=_typed(row, "temperature", (int, float), None),
        top_p=_typed(row, "top_p", (int, float), None),
        effort=_typed(row, "reasoning_effort", str, None),
    )


def _check_options(row: Mapping[str, Any]) -> None:
    for key, value in row.items():
        if value is None or key in READ or key in WITHOUT_EFFECT:
            continue
        if key not in FIXED:
            raise _bad("it is not known here; leave it out", key, "unknown_parameter")
        if not any(type(value) is type(fixed) and value == fixed for fixed in FIXED[key]):
            fixed = f"it is always {orjson.dumps(FIXED[key][0]).decode()} here" if FIXED[key] else "it is not supported"
            raise _bad(f"{fixed}; leave it out", key, "unsupported_value")


def _messages(rows: object) -> tuple[Message, ...]:
    if not isinstance(rows, list) or not rows:
        raise _bad("it must be a list of messages, and not empty", "messages")
    return tuple(_message(row, f"messages.{i}") for i, row in enumerate(rows))


def _message(row: object, param: str) -> Message:
    if not isinstance(row, dict):
        raise _bad("it must be an object", param)
    role = row.get("role")
    if role not in ROLES:
        raise _bad(f"its role must be one of {', '.join(ROLES)}", param)
    for key, value in row.items():
        if key not in MESSAGE_KEYS and value is not None and value != []:
            raise _bad(f"{reprlib.repr(key)} is not known here, and would be lost", param)
    content, reasoning = _content(row.get("content"), param), _reasoning(row, param)
    calls = _calls(row.get("tool_calls"), param)
    if role != "assistant" and (reasoning or calls):
        raise _bad("only the assistant's has reasoning_content or tool_calls", param)
    if content is None and role != "assistant":
        raise _bad("it has no content", param)
    tool_call_id = _typed(row, "tool_call_id", str, None, param)
    if (role == "tool") != (tool_call_id is not None):
        raise _bad("messages of the role tool, and no others, have a tool_call_id", param)
    name = _typed(row, "name", str, None, param)
    return Message(role, content, reasoning, calls, tool_call_id, name)


def _content(value: object, param: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(_is_text(part) for part in value):
        raise _bad("its content must be text, or a list of parts of the type text", param)
    return "".join(part["text"] for part in cast(list[dict[str, str]], value))


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _reasoning(row: Mapping[str, Any], param: str) -> str:
    """Under either of the names that clients give it."""
    said = [row[key] for key in ("reasoning_content", "reasoning") if row.get(key) is not None]
    if not all(isinstance(text, str) for text in said) or len(set(said)) > 1:
        raise _bad("its reasoning_content must be text, once", param)
    return said[0] if said else ""


def _calls(rows: object, param: str) -> tuple[Call, ...]:
    if rows is None:
        return ()
    if not isinstance(rows, list):
        raise _bad("its tool_calls must be a list", param)
    return tuple(_call(row, f"{param}.tool_calls.{i}") for i, row in enumerate(rows))


def _call(row: object, param: str) -> Call:
    function = row.get("function") if isinstance(row, dict) else None
    if not isinstance(row, dict) or not isinstance(function, dict) or row.get("type", "function") != "function":
        raise _bad("it must be an object with id, the type function, and function", param)
    name, text, ident = function.get("name"), function.get("arguments"), row.get("id")
    if not isinstance(ident, str) or not isinstance(name, str) or not NAME.fullmatch(name):
        raise _bad("its id or the name of its function is missing, or no name", param)
    try:
        arguments = read_json(text) if isinstance(text, str) else None
    except ValueError as error:
        raise _bad(f"its arguments are no JSON: {error}", param) from None
    if not isinstance(arguments, dict):
        raise _bad("its arguments must be the JSON text of an object", param)
    return Call(ident, name, cast(str, text))


def _tools(rows: object) -> tuple[Mapping[str, Any], ...]:
    if rows is None:
        return ()
    if not isinstance(rows, list):
        raise _bad("it must be a list", "tools")
    for i, row in enumerate(rows):
        function = row.get("function") if isinstance(row, dict) and row.get("type") == "function" else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise _bad("it must be of the type function, with a name of letters, digits, _, . and -", f"tools.{i}")
    return tuple(rows)


def _typed(row: Mapping[str, Any], key: str, kind: Any, default: Any, param: str = "") -> Any:
    """The value of a key that may be absent or null; true and false are no numbers."""
    value = row.get(key)
    if value is None:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise _bad("it has another type than it should", f"{param}.{key}" if param else key)
    return value


def _call_row(call: Call, as_text: bool) -> dict[str, Any]:
    arguments = call.arguments if as_text else read_json(call.arguments)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _bad(reason: str, param: str, code: str | None = None) -> Refused:
    shown = param if param.isprintable() and len(param) < SHOWN else reprlib.repr(param)
    return Refused(400, f"{shown}: {reason}", code, param)
