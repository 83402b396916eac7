"""Laws of the project's own chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chat import write_chat_folder, xtml_renderer

from megatron_mopd.config import Config, Prompts, Rollout, Run, Student
from megatron_mopd.errors import UserError
from megatron_mopd.prompts.conversation import render_conversations
from megatron_mopd.prompts.demonstrations import Demonstration
from megatron_mopd.prompts.history import CONVERSATION, TOOLS
from megatron_mopd.prompts.render import Renderer
from megatron_mopd.prompts.xtml import EFFORTS, MARKERS, check_xtml
from megatron_mopd.types import Prompt

USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return xtml_renderer(tmp_path_factory.mktemp("xtml"))


def test_a_conversation_is_written_as_documented(renderer: Renderer) -> None:
    call = {"id": "b", "function": {"name": "look", "arguments": {"key": "A"}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Look"}, {"type": "text", "text": " twice."}]},
        {"role": "assistant", "reasoning_content": "hm", "tool_calls": [{**call, "id": "a"}, call]},
        {"role": "tool", "tool_call_id": "b", "content": "7"},
        {"role": "assistant", "content": "Seven."},
    ]
    text = renderer.text(messages, "high", "m", add_generation_prompt=True, tools=[TOOLS[0]["function"]])
    declared, text = text.split("<|end_of_msg|>", 1)
    assert declared.startswith('<|open|>tools<|sep|>{"name": "look", "description": ')
    assert text == (
        '<|open|>option type="thinking-effort"<|sep|>high<|end_of_msg|>'
        "<|open|>system<|sep|>Be brief.<|end_of_msg|><|open|>user<|sep|>Look twice.<|end_of_msg|>"
        "<|open|>assistant<|sep|><|open|>think<|sep|>hm<|close|><|open|>tools<|sep|>"
        '<|open|>call name="look"<|sep|>{"key": "A"}<|close|><|open|>call name="look"<|sep|>{"key": "A"}<|close|>'
        '<|close|><|end_of_msg|><|open|>tool call="2"<|sep|>7<|end_of_msg|>'
        "<|open|>assistant<|sep|><|open|>think<|sep|><|close|><|open|>response<|sep|>Seven.<|close|><|end_of_msg|>"
        "<|open|>assistant<|sep|>"
    )


def test_arguments_of_text_are_written_as_they_are(renderer: Renderer) -> None:
    call = {"name": "look", "arguments": '{"key":  1e2}'}
    text = renderer.text([USER, {"role": "assistant", "tool_calls": [call]}], None, "m")
    assert '<|sep|>{"key":  1e2}<|close|>' in text


def test_without_an_effort_nobody_reads_one(renderer: Renderer) -> None:
    (prompt,) = renderer.render([Prompt("p", "law", "low", "qa", (USER,))])
    option = tuple(renderer.encode(['<|open|>option type="thinking-effort"<|sep|>low<|end_of_msg|>'])[0])
    assert prompt.student_ids == option + prompt.teacher_ids


@pytest.mark.parametrize("effort", EFFORTS)
def test_the_schema_of_the_effort(renderer: Renderer, effort: str) -> None:
    assert f"<|sep|>{effort}<|end_of_msg|>" in renderer.text([USER], effort, "m")
    with pytest.raises(UserError, match="must be low, medium, high or max, not huge"):
        renderer.text([USER], "huge", "m")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "developer", "content": "x"}, "roles are system, user, assistant and tool, not developer"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "content is text alone, not image_url"),
        ({"role": "user"}, "a message has no content"),
    ],
)
def test_what_it_cannot_say_is_refused(renderer: Renderer, message: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        renderer.text([message], None, "m")


def test_of_a_demonstration_the_whole_of_each_turn_is_learnt(renderer: Renderer) -> None:
    demonstration = Demonstration("d", "law", "max", CONVERSATION)
    (found,) = render_conversations(renderer, [demonstration], [False])
    spoken = [token for token, sampled in zip(found.token_ids, found.loss_mask, strict=True) if sampled]
    text = renderer.tokenizer.decode(spoken)
    assert text.startswith("<|open|>think<|sep|>I have not looked yet.<|close|><|open|>response<|sep|>Let me see.")
    assert text.endswith("<|open|>think<|sep|><|close|><|open|>response<|sep|>Sure.<|close|><|end_of_msg|>")
    assert text.count("<|end_of_msg|>") == 4
    assert "<|open|>assistant" not in text


def config(folder: Path, **prompts: Any) -> Config:
    return Config(
        run=Run(folder=folder, num_steps=1),
        student=Student(checkpoint=folder),
        prompts=Prompts(batch_size=1, mixture={"law": 1.0}, chat_template="xtml", **prompts),
        rollout=Rollout(max_response_tokens=1),
    )


def test_what_cannot_use_it_is_refused_before_the_run(tmp_path: Path) -> None:
    whole = write_chat_folder(tmp_path / "whole")
    check_xtml(config(whole))
    assert Renderer.of_student(config(whole)).text([USER], "low", "m").startswith("<|open|>option")
    with pytest.raises(UserError, match="effort_variable=effort: the template xtml reads thinking_effort; set that"):
        check_xtml(config(whole, effort_variable="effort"))
    with pytest.raises(UserError, match=r"prompts.efforts.huge: the template xtml knows the efforts low, medium, high"):
        check_xtml(config(whole, efforts={"low": 1.0, "huge": 1.0}))
    lacking = write_chat_folder(tmp_path / "lacking", tokens=MARKERS[1:])
    for refused in (check_xtml, Renderer.of_student):
        with pytest.raises(UserError, match=r"<\|open\|> is no token of .*lacking; add <\|open\|>, <\|sep\|>"):
            refused(config(lacking))


def test_variables_of_the_call_are_no_variables_of_the_template(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"prompts.template_variables.tools is set by the template call; remove it"):
        Renderer(write_chat_folder(tmp_path), None, variables={"tools": []})
