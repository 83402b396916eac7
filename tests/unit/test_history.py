"""Laws: a template that drops what was said is refused, and what differs is shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from chat import FORGETFUL, HERMES, HERMES_TOKENS, hermes_renderer, write_chat_folder, xtml_renderer

from megatron_mopd.errors import UserError
from megatron_mopd.prompts.history import first_difference
from megatron_mopd.prompts.render import Renderer
from megatron_mopd.rollout.thinking import check_thinking


def test_templates_that_keep_what_was_said_pass(tmp_path: Path) -> None:
    check_thinking(xtml_renderer(tmp_path / "xtml"))
    check_thinking(hermes_renderer(tmp_path / "hermes"))


def test_a_template_that_forgets_is_refused_with_the_first_difference(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        check_thinking(hermes_renderer(tmp_path, FORGETFUL))
    text = str(caught.value)
    assert text.startswith(f"the chat template of {tmp_path} writes what is up to message 1 in another way once more")
    assert "at character " in text
    assert r"'Let me see.<|im_end|>\n<|im_start|>user\nT', where '<think>\nI have not looked yet.\n</think>\n'" in text
    assert "\n" not in text


def test_a_variable_that_makes_it_keep_thinking_is_passed_on(tmp_path: Path) -> None:
    check_thinking(hermes_renderer(tmp_path, FORGETFUL, keep=True))


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (HERMES.replace("m.reasoning_content or ''", "''"), "message 1 without its reasoning_content 'I have not"),
        (HERMES.replace("call.function.name", "'other'"), r"message 3 so that its calls is read back as \[\('other'"),
        (HERMES.replace("{{- m.content", " {{- m.content | upper"), "message 1 so that its content is read back as"),
        (HERMES.replace("<|im_end|>", "<|im_start|>"), "message 1 without the token that ends a turn"),
    ],
)
def test_other_ways_to_lose_what_was_said(tmp_path: Path, template: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        check_thinking(hermes_renderer(tmp_path, template))


def test_the_template_of_a_tokenizer_without_call_tokens_is_checked_without_calls(tmp_path: Path) -> None:
    folder = write_chat_folder(tmp_path, HERMES, tuple(t for t in HERMES_TOKENS if "tool_call" not in t))
    check_thinking(Renderer(folder, None))


def test_the_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference("ab", "") == 0
