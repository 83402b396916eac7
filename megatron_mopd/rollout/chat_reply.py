"""Answers, streams and errors in the shape of OpenAI's chat completions. Thinking is `reasoning_content`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import orjson

from megatron_mopd.rollout.chat_request import Call, Refused
from megatron_mopd.rollout.chat_session import Answer

PIECE = 256
"""Characters of a piece of a stream."""
DONE = b"data: [DONE]\n\n"


def completion(ident: str, model: str, answer: Answer) -> dict[str, Any]:
    message = answer.message
    row: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.reasoning:
        row["reasoning_content"] = message.reasoning
    if message.calls:
        row["tool_calls"] = [_call(call) for call in message.calls]
    choice = {"index": 0, "message": row, "finish_reason": answer.finish_reason, "logprobs": None}
    return {**_head(ident, model, "chat.completion"), "choices": [choice], "usage": usage(answer)}


def stream(ident: str, model: str, answer: Answer, with_usage: bool) -> Iterator[bytes]:
    """The same in pieces, as server-sent events."""
    head = _head(ident, model, "chat.completion.chunk")
    for delta in _deltas(answer):
        yield event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    yield event({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": answer.finish_reason}]})
    if with_usage:
        yield event({**head, "choices": [], "usage": usage(answer)})
    yield DONE


def usage(answer: Answer) -> dict[str, int]:
    prompt, sampled = answer.num_prompt_tokens, answer.num_sampled_tokens
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def error(refused: Refused) -> dict[str, Any]:
    kind = "server_error" if refused.status >= 500 else "invalid_request_error"
    return {"error": {"message": refused.message, "type": kind, "param": refused.param, "code": refused.code}}


def event(row: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(row) + b"\n\n"


def _head(ident: str, model: str, kind: str) -> dict[str, Any]:
    return {"id": ident, "object": kind, "created": int(time.time()), "model": model}


def _deltas(answer: Answer) -> Iterator[dict[str, Any]]:
    message = answer.message
    yield {"role": "assistant", "content": None if message.content is None else ""}
    for piece in _pieces(message.reasoning):
        yield {"reasoning_content": piece}
    for piece in _pieces(message.content or ""):
        yield {"content": piece}
    for i, call in enumerate(message.calls):
        begin = _call(call)
        begin["function"]["arguments"] = ""
        yield {"tool_calls": [{"index": i, **begin}]}
        for piece in _pieces(call.arguments):
            yield {"tool_calls": [{"index": i, "function": {"arguments": piece}}]}


def _pieces(text: str) -> Iterator[str]:
    yield from (text[at : at + PIECE] for at in range(0, len(text), PIECE))


def _call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
