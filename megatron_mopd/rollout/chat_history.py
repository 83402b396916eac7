"""What of a request's messages is new, and whether the rest is what was said.

The student was sampled on exactly what was said before. A client that sends something else back, or leaves something
out, wants an answer to another conversation, which no trajectory could hold: it is refused, with the first message
that differs. Text must be equal; arguments of calls may be another JSON text of the same value, since the ids that
were sampled are what is kept.

Promises: tests/unit/test_chat_session.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from megatron_mopd.rollout.chat_request import Call, Message, Refused
from megatron_mopd.rollout.turns import read_json

STRIPPED, REWRITTEN, DROPPED, INVENTED = (
    "reasoning_stripped",
    "history_rewritten",
    "history_dropped",
    "history_invented",
)


def new_messages(recorded: Sequence[Message], sent: Sequence[Message]) -> tuple[Message, ...]:
    """Those after the recorded ones. Raises Refused, which names the message by its index."""
    for i, said in enumerate(recorded):
        if i == len(sent):
            raise _refused(i, f"is missing: it is the {said.role}'s, and {len(recorded)} were said", DROPPED)
        if change := _change(said, sent[i]):
            raise _refused(i, *change)
    new = tuple(sent[len(recorded) :])
    if not new:
        raise _refused(len(recorded), "is missing: nothing follows what the student has said", DROPPED)
    open_calls = {call.id for call in recorded[-1].calls}
    for i, message in enumerate(new, start=len(recorded)):
        if message.role == "assistant":
            raise _refused(i, "is the assistant's, and was not sampled here", INVENTED)
        if message.role == "tool":
            if message.tool_call_id not in open_calls:
                raise _refused(i, f"answers no open call: tool_call_id {message.tool_call_id!r}", INVENTED)
            open_calls.remove(message.tool_call_id)
    return new


def _change(said: Message, sent: Message) -> tuple[str, str] | None:
    """What of a message is another, and the code of that."""
    if said.role != sent.role:
        return f"is the {sent.role}'s, and was the {said.role}'s", REWRITTEN
    if said.reasoning and not sent.reasoning:
        return "comes without its reasoning_content: send it back as it was received, thinking is kept", STRIPPED
    if said.reasoning != sent.reasoning:
        return "has another reasoning_content than was sampled", REWRITTEN
    if (said.content or "") != (sent.content or ""):
        return "has another content than it had", REWRITTEN
    if len(said.calls) != len(sent.calls) or not all(map(_same_call, said.calls, sent.calls)):
        return "has other tool_calls than it had", REWRITTEN
    if (said.tool_call_id, said.name) != (sent.tool_call_id, sent.name):
        return "has another tool_call_id or name than it had", REWRITTEN
    return None


def _same_call(one: Call, other: Call) -> bool:
    if (one.id, one.name) != (other.id, other.name):
        return False
    return one.arguments == other.arguments or _canonical(one.arguments) == _canonical(other.arguments)


def _canonical(text: str) -> str:
    return json.dumps(read_json(text), sort_keys=True)


def _refused(i: int, reason: str, code: str) -> Refused:
    return Refused(400, f"message {i} {reason}", code, f"messages.{i}")
