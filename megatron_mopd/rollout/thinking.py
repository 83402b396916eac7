"""The check of prompts/history.py with what reads the student's turns: may a history be rendered again at all?"""

from __future__ import annotations

from megatron_mopd.config import Config
from megatron_mopd.prompts.history import Spoken, check_history
from megatron_mopd.prompts.render import Renderer
from megatron_mopd.rollout.tool_calls import ToolCall, turn_parser


def check_thinking(renderer: Renderer) -> None:
    """Raise UserError for a template that drops thinking, or whose turns are not read back as they were said."""
    parser = turn_parser(renderer)

    def read(token_ids: list[int]) -> Spoken:
        turn = parser.parse(token_ids)
        calls = [(c.name, c.arguments) if isinstance(c, ToolCall) else ("", c.reason) for c in turn.calls]
        return Spoken(turn.reasoning, turn.content or "", calls)

    check_history(renderer, read, with_tools=parser.has_tools)


def check_student_thinking(config: Config) -> None:
    check_thinking(Renderer.of_student(config))
