"""Law: what is learnt from a demonstration are exactly the assistant's tokens, whatever else is in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from megatron_mopd.batch import Batch
from megatron_mopd.errors import UserError
from megatron_mopd.prompts.conversation import Conversation, render_conversations
from megatron_mopd.prompts.demonstrations import Demonstration, Response
from megatron_mopd.prompts.render import Renderer
from megatron_mopd.types import Cell, Prompt

TEMPLATE = """\
{%- if thinking_effort is defined %}<|im_start|>effort {{ thinking_effort }}<|im_end|>
{% endif -%}
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif -%}
{{- m.content or '' -}}
{%- for call in m.tool_calls or [] %}<call>{{ call | tojson }}</call>{% endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
FORGETFUL = TEMPLATE.replace("{% if m.reasoning_content %}", "{% if m.reasoning_content and loop.last %}")
"""Drops the thinking of earlier turns, as Qwen3's does."""

CALL = {"name": "look", "arguments": {"key": "A"}}
MESSAGES: tuple[dict[str, Any], ...] = (
    {"role": "system", "content": "Tools: look"},
    {"role": "user", "content": "What is at A?"},
    {"role": "assistant", "reasoning_content": "xylophone?", "tool_calls": [CALL]},
    {"role": "tool", "content": "assistant\n7"},
    {"role": "assistant", "content": "x = 7"},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "reasoning_content": "yes", "content": "Yes."},
    {"role": "user", "content": "Thanks."},
)


def write_tokenizer(folder: Path, template: str) -> Renderer:
    """Bytes, and one merge that would reach over the place where the assistant begins to speak."""
    alphabet = sorted(ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate([*alphabet, "Ċx", "Ċ<"])}
    tokenizer = Tokenizer(BPE(vocabulary, [("Ċ", "x"), ("Ċ", "<")]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(template)
    return Renderer(folder, "thinking_effort")


@pytest.fixture
def renderer(tmp_path: Path) -> Renderer:
    return write_tokenizer(tmp_path, TEMPLATE)


def text_of(renderer: Renderer, ids: list[int]) -> str:
    return bytes_of(renderer.tokenizer.convert_ids_to_tokens(ids))


def bytes_of(tokens: list[str]) -> str:
    """Of a byte-level tokenizer; these texts are ASCII."""
    return "".join(tokens).replace("Ċ", "\n").replace("Ġ", " ")


def conversation(
    renderer: Renderer, messages: tuple[dict[str, Any], ...] = MESSAGES, *, neutral: bool = False
) -> Conversation:
    (found,) = render_conversations(renderer, [Demonstration("d", "law", "low", messages)], [neutral])
    return found


def spoken(renderer: Renderer, c: Conversation) -> str:
    return text_of(renderer, [token for token, sampled in zip(c.token_ids, c.loss_mask, strict=True) if sampled])


def test_the_mask_is_exactly_what_the_assistant_says(renderer: Renderer) -> None:
    """Its tool calls, its thinking and the token that ends its turn; not what the tool returns, though that quotes it,
    nor what follows the last turn."""
    got = conversation(renderer)
    call = json.dumps(CALL)
    assert spoken(renderer, got) == (
        f"<think>xylophone?</think><call>{call}</call><|im_end|>"
        + "x = 7<|im_end|>"
        + "<think>yes</think>Yes.<|im_end|>"
    )
    assert len(got.token_ids) == len(got.loss_mask)
    whole = renderer.text(MESSAGES, "low", "d")
    assert text_of(renderer, got.token_ids) == whole[: whole.index("<|im_start|>user\nThanks.")]


@pytest.mark.parametrize("upto", [3, 5, 7])
def test_each_turn_is_masked_as_if_the_conversation_ended_there(renderer: Renderer, upto: int) -> None:
    part, whole = conversation(renderer, MESSAGES[:upto]), conversation(renderer)
    assert whole.token_ids[: len(part.token_ids)] == part.token_ids
    assert whole.loss_mask[: len(part.loss_mask)] == part.loss_mask


def test_the_context_is_the_prompt_of_a_rollout(renderer: Renderer) -> None:
    """A tokenizer that saw the whole would merge the end of the prompt with the first letter of the answer."""
    got = conversation(renderer, (MESSAGES[1], {"role": "assistant", "content": "x"}))
    (prompt,) = renderer.render([Prompt("p", "law", "low", "qa", (MESSAGES[1],))])
    first = got.loss_mask.index(True)
    assert tuple(got.token_ids[:first]) == prompt.student_ids
    assert renderer.encode([text_of(renderer, got.token_ids)])[0] != got.token_ids


def test_a_neutral_one_is_what_a_teacher_reads(renderer: Renderer) -> None:
    neutral, shown = conversation(renderer, neutral=True), conversation(renderer)
    (prompt,) = renderer.render([Prompt("p", "law", "low", "qa", MESSAGES[:2])])
    assert tuple(neutral.token_ids[: neutral.loss_mask.index(True)]) == prompt.teacher_ids
    assert tuple(shown.token_ids[: shown.loss_mask.index(True)]) == prompt.student_ids
    assert spoken(renderer, neutral) == spoken(renderer, shown)


def test_a_template_that_forgets_is_refused(tmp_path: Path) -> None:
    renderer = write_tokenizer(tmp_path / "forgetful", FORGETFUL)
    with pytest.raises(UserError, match="demonstration d: the student's chat template writes message 3 differently"):
        conversation(renderer)
    one_turn = (MESSAGES[1], MESSAGES[6])
    assert spoken(renderer, conversation(renderer, one_turn)) == "<think>yes</think>Yes.<|im_end|>"


def test_a_template_that_refuses_names_the_demonstration(tmp_path: Path) -> None:
    renderer = write_tokenizer(tmp_path / "strict", "{{ raise_exception('no tools here') }}")
    with pytest.raises(UserError, match="chat template refuses demonstration d: no tools here"):
        conversation(renderer)


def test_rows_of_a_batch_are_the_conversations(renderer: Renderer) -> None:
    some = [conversation(renderer, MESSAGES[:3]), conversation(renderer)]
    cells = (Cell("law", "low"), Cell("law", "max"))
    batch = Batch.from_rows([c.token_ids for c in some], [c.loss_mask for c in some], [1, 0], cells)
    for row, c in enumerate(some):
        one = batch.select([row])
        assert (one.token_ids.tolist(), one.loss_mask.tolist()) == (c.token_ids, c.loss_mask)
    assert batch.cell.tolist() == [1, 0]
    assert not batch.rollout_logprobs.any()
    assert batch.outcome_advantage is None


def test_a_response_of_tokens_follows_the_prompt_and_is_not_tokenized_again(renderer: Renderer) -> None:
    """Even where the tokenizer would have written its text in other tokens."""
    new_line, x = renderer.tokenizer.convert_tokens_to_ids(["Ċ", "x"])
    response = Response(np.array([new_line, x, x], np.int32), np.array([True, True, False]))
    prompt = Prompt("p", "law", "low", "e", MESSAGES[:2])
    (rendered,) = renderer.render([prompt])
    for neutral, ids in ((False, rendered.student_ids), (True, rendered.teacher_ids)):
        demonstration = Demonstration("d", "law", "low", MESSAGES[:2], response=response)
        (found,) = render_conversations(renderer, [demonstration], [neutral])
        assert found.token_ids == [*ids, new_line, x, x]
        assert found.loss_mask == [False] * len(ids) + [True, True, False]
