"""Law: any bytes are a request, or refused with a reason; nothing that a client asks for is ignored."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mopd.prompts.history import CONVERSATION, TOOLS
from megatron_mopd.rollout.chat_request import Call, ChatRequest, Message, Refused, read_request

USER = {"role": "user", "content": "hi"}
CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"key":"A"}'}}
FULL = {
    "model": "student",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        USER,
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL], "refusal": None},
        {"role": "tool", "tool_call_id": "a", "content": "7"},
    ],
    "tools": list(TOOLS),
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 9,
    "max_completion_tokens": 7,
    "temperature": 1,
    "n": 1,
    "user": "me",
}


def read(**changes: Any) -> ChatRequest:
    return read_request(json.dumps({"messages": [USER], **changes}).encode())


def test_a_request_is_read() -> None:
    got = read_request(json.dumps(FULL).encode())
    assert got.messages == (
        Message("system", "Be brief."),
        Message("user", "hi"),
        Message("assistant", None, "hm", (Call("a", "look", '{"key":"A"}'),)),
        Message("tool", "7", tool_call_id="a"),
    )
    assert (got.max_tokens, got.stream, got.with_usage, got.temperature, got.model) == (7, True, True, 1, "student")
    assert got.tools == TOOLS
    assert got.messages[2].for_template(False)["tool_calls"][0]["function"]["arguments"] == {"key": "A"}
    assert got.messages[2].for_template(True)["tool_calls"] == [CALL]


def test_thinking_may_have_either_name() -> None:
    (message,) = read(messages=[{"role": "assistant", "content": "", "reasoning": "hm"}]).messages
    assert message.reasoning == "hm"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"n": 2}, "n: it is always 1 here; leave it out"),
        ({"n": True}, "n: it is always 1 here"),
        ({"seed": 7}, "seed: it is not supported; leave it out"),
        ({"stop": ["x"]}, "stop: it is always [] here"),
        ({"functions": []}, "functions: it is not known here"),
        ({"tool_choice": "required"}, 'tool_choice: it is always "auto" here'),
        ({"temperature": "1"}, "temperature: it has another type"),
        ({"stream": 1}, "stream: it has another type"),
        ({"max_tokens": 0}, "max_tokens: it must be a whole number above 0"),
        ({"max_tokens": True}, "max_tokens: it must be a whole number above 0"),
        ({"stream_options": 3}, "stream_options: it must be an object"),
        ({"messages": []}, "messages: it must be a list of messages, and not empty"),
        ({"messages": {}}, "messages: it must be a list of messages"),
        ({"messages": [3]}, "messages.0: it must be an object"),
        ({"messages": [USER, {"role": "developer", "content": "x"}]}, "messages.1: its role must be one of system, "),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages.0: its role must be one of"),
        ({"messages": [{"role": "user"}]}, "messages.0: it has no content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0: its content must be text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0: its content must be text"),
        ({"messages": [{**USER, "cache_control": {}}]}, "messages.0: 'cache_control' is not known here, and would be"),
        ({"messages": [{**USER, "reasoning": "x"}]}, "messages.0: only the assistant's has reasoning_content"),
        ({"messages": [{**USER, "tool_call_id": "a"}]}, "messages.0: messages of the role tool, and no others, have a"),
        ({"messages": [{"role": "tool", "content": "7"}]}, "messages.0: messages of the role tool, and no others"),
        (
            {"messages": [{"role": "assistant", "reasoning": "a", "reasoning_content": "b"}]},
            "messages.0: its reasoning",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0.tool_calls.0: it must be an object"),
        ({"messages": [{"role": "assistant", "tool_calls": 1}]}, "messages.0: its tool_calls must be a list"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "a", "arguments": "{"}}]}
                ]
            },
            "messages.0.tool_calls.0: its arguments are no JSON",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0: it must be of the type function"),
        ({"tools": {}}, "tools: it must be a list"),
    ],
)
def test_what_is_no_request_is_refused_with_its_place(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(Refused) as caught:
        read(**change)
    assert caught.value.status == 400
    assert caught.value.message.startswith(reason)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[]", b'{"messages": "\\ud800"}', b"[" * 5000, b"NaN"])
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(Refused) as caught:
        read_request(body)
    assert caught.value.status == 400


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 1 << 65) | st.floats() | st.text(max_size=4),
    lambda v: (
        st.lists(v, max_size=2) | st.dictionaries(st.sampled_from(["role", "content", "id", "type", "function"]), v)
    ),
    max_leaves=6,
)


@settings(max_examples=200)
@given(key=st.sampled_from([*FULL, "reasoning_effort", "seed"]), value=VALUES)
def test_any_value_of_any_field_is_read_or_refused(key: str, value: Any) -> None:
    check(json.dumps({**FULL, key: value}).encode())


def check(body: bytes) -> bool:
    try:
        return isinstance(read_request(body), ChatRequest)
    except Refused as error:
        refused = error
    assert (refused.status, bool(refused.message), "\n" in refused.message) == (400, True, False)
    return False


def test_any_bytes_are_read_or_refused() -> None:
    """50,000 inputs: requests with bytes and with values changed, moved and left out."""
    full = [json.dumps(FULL).encode(), json.dumps({"messages": CONVERSATION, "tools": TOOLS}).encode()]
    pieces = [
        b'"',
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"null",
        b"true",
        b"-1",
        b"1e99",
        b"\\",
        b"\xf0",
        b'"tool"',
        b"{}",
    ]
    read = 0
    for seed in range(50_000):
        random = Random(seed)
        body = bytearray(random.choice(full))
        for _ in range(random.randint(1, 3)):
            at = random.randrange(len(body))
            body[at : at + random.choice((0, 1, 1, 4, 30))] = random.choice(pieces) if random.random() < 0.7 else b""
        try:
            read += check(bytes(body))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {bytes(body)!r}") from error
    assert 500 < read < 49_000
