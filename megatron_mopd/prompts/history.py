"""Is a history, rendered again, what was sampled?

A policy that was trained with its thinking kept goes wrong where it is dropped, and many templates drop the thinking of
earlier turns. Two checks:

    check_history     at start, on a conversation made for it: the template writes each turn once and for all, the
                      thinking is in it, and what is read from its tokens is what was said
    first_difference  of each turn: the ids that were sampled, against those of the template on what was read from them

A turn that differs is no fault of anyone where a policy writes in other tokens than the tokenizer would: its ids are
what counts, and nobody trains on the others.

Promises: tests/unit/test_history.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from megatron_mopd.errors import UserError
from megatron_mopd.prompts.render import Renderer

SHOWN = 40
"""Characters of a difference."""
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look at a place.",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
        },
    },
)
_CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": {"key": "A"}}}
CONVERSATION: tuple[Mapping[str, Any], ...] = (
    {"role": "user", "content": "What is at A?"},
    {"role": "assistant", "reasoning_content": "I have not looked yet.", "content": "Let me see."},
    {"role": "user", "content": "Then look."},
    {"role": "assistant", "reasoning_content": "Looking shows it.", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call_1", "name": "look", "content": "7"},
    {"role": "assistant", "reasoning_content": "So it is seven.", "content": "7"},
    {"role": "user", "content": "Thanks."},
    {"role": "assistant", "reasoning_content": "", "content": "Sure."},
    {"role": "user", "content": "Bye."},
)
_WITHOUT_TOOLS = tuple(m for m in CONVERSATION if m["role"] != "tool" and not m.get("tool_calls"))


class Difference(NamedTuple):
    """`at` is the place of the first token, or character, that differs."""

    at: int
    sampled: str
    rendered: str


class Spoken(NamedTuple):
    """What a turn was read as; see rollout/turns.py."""

    reasoning: str
    content: str
    calls: list[tuple[str, Any]]


def first_difference(sampled: Sequence[Any], rendered: Sequence[Any]) -> int | None:
    """None where they are equal."""
    for at, (one, other) in enumerate(zip(sampled, rendered, strict=False)):
        if one != other:
            return at
    return None if len(sampled) == len(rendered) else min(len(sampled), len(rendered))


def check_history(renderer: Renderer, read: Callable[[list[int]], Spoken] | None, with_tools: bool) -> None:
    """Raise UserError, which shows the first difference, for a template that drops or rewrites what was said.

    `read` is how tokens of a turn are parsed; None: that is not checked.
    """
    messages, tools = (CONVERSATION, TOOLS) if with_tools else (_WITHOUT_TOOLS, ())
    whole = _text(renderer, messages, tools, generates=True)
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _text(renderer, messages[:i], tools, generates=True)
        after = _text(renderer, messages[: i + 1], tools)
        _check_goes_on(renderer, i, before, after)
        if message["reasoning_content"] not in after[len(before) :]:
            raise _refusal(renderer, f"message {i} without its reasoning_content {message['reasoning_content']!r}")
        _check_goes_on(renderer, i, after, whole)
        if read is not None:
            _check_read(renderer, i, message, read, after[len(before) :])


def _check_goes_on(renderer: Renderer, i: int, text: str, longer: str) -> None:
    if longer.startswith(text):
        return
    at = first_difference(text, longer) or 0
    found = Difference(at, text[at : at + SHOWN], longer[at : at + SHOWN])
    raise _refusal(
        renderer,
        f"what is up to message {i} in another way once more follows: at character {found.at} {found.rendered!r}, "
        f"where {found.sampled!r} was sampled",
    )


def _check_read(
    renderer: Renderer, i: int, message: Mapping[str, Any], read: Callable[[list[int]], Spoken], text: str
) -> None:
    (ids,) = renderer.encode([text])
    ends = [k for k, token in enumerate(ids) if token in renderer.end_ids]
    if not ends:
        raise _refusal(renderer, f"message {i} without the token that ends a turn: {text[-SHOWN:]!r}")
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    want, got = Spoken(message["reasoning_content"], message["content"], calls), read(ids[: ends[-1] + 1])
    for name, said, parsed in zip(Spoken._fields, want, got, strict=True):
        if said != parsed:
            raise _refusal(renderer, f"message {i} so that its {name} is read back as {parsed!r}, not {said!r}")


def _text(
    renderer: Renderer, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], generates=False
) -> str:
    return renderer.text(messages, None, "a history with thinking", add_generation_prompt=generates, tools=tools)


def _refusal(renderer: Renderer, what: str) -> UserError:
    return UserError(
        f"the chat template of {renderer.checkpoint} writes {what}; set prompts.chat_template=xtml, or "
        "prompts.template_variables to what makes it keep thinking"
    )
