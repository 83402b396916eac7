"""What the student said in a turn: thinking, answer and function calls, read from the ids of its tokens.

The markers are tokens, found by id; text between them is decoded and never searched, so an answer that spells a marker
says just that. Two ways of writing are known, and `turn_parser` chooses by the template:

    xtml      <|open|>think<|sep|>..<|close|> <|open|>response<|sep|>..<|close|>
              <|open|>tools<|sep|> <|open|>call name="look"<|sep|>{"key": "A"}<|close|> <|close|> <|end_of_msg|>
    Hermes    <think>..</think> answer <tool_call>{"name": "look", "arguments": {"key": "A"}}</tool_call>

Promises (tests/unit/test_tool_calls.py): any sequence of tokens is a Turn, no exception leaves `parse`; a call that is
none is a BadCall with a reason that can be answered to the student; no text of a turn is lost: what fits nowhere is
in its content, with the reason as `fault`. What the template renders of a well-formed turn is parsed to that turn.
"""

from __future__ import annotations

from megatron_mopd.prompts.render import Renderer
from megatron_mopd.rollout.hermes_turns import HermesTurns
from megatron_mopd.rollout.turns import BadCall, ToolCall, Turn, TurnParser
from megatron_mopd.rollout.xtml_turns import XtmlTurns

__all__ = ["BadCall", "ToolCall", "Turn", "TurnParser", "turn_parser"]


def turn_parser(renderer: Renderer) -> TurnParser:
    if renderer.chat_template == "xtml":
        return XtmlTurns(renderer.tokenizer)
    return HermesTurns(renderer.tokenizer, renderer.end_ids)
