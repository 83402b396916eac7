"""A demonstration as token ids, and which of them are the assistant's.

A chat template is a program, so what it wrote for whom is found out by running it on the beginnings of a conversation:

    rendered up to message i, with the generation prompt     ends where the assistant begins to speak
    rendered up to and with message i                         ends where it has spoken

Both must be beginnings of the whole rendering. A template that says something else of a message once others follow it
(Qwen3's drops the thinking of earlier turns) is refused: the policy would learn from a context that it never has.

The text is cut at these places before it is encoded, so tokens are those of a rollout, where a prompt is encoded by
itself. Promises (tests/unit/test_conversation.py): exactly the assistant's tokens are in the mask, observations are
not, nor is what a template writes after the token that ends a turn; the ids before an assistant's first message are
those of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_mopd.errors import UserError
from megatron_mopd.prompts.demonstrations import Demonstration, Response
from megatron_mopd.prompts.render import Renderer


class Conversation(NamedTuple):
    token_ids: list[int]
    loss_mask: list[bool]


def render_conversations(
    renderer: Renderer, demonstrations: Sequence[Demonstration], is_neutral: Sequence[bool]
) -> list[Conversation]:
    """Each with its effort in the prompt unless it is neutral."""
    pieces = [
        _pieces(renderer, demonstration, neutral)
        for demonstration, neutral in zip(demonstrations, is_neutral, strict=True)
    ]
    ids = iter(renderer.encode([text for of_one in pieces for text, _ in of_one]))
    said = [_joined([(next(ids), spoken) for _, spoken in of_one], renderer.end_ids) for of_one in pieces]
    return [_continued(c, d.response) for c, d in zip(said, demonstrations, strict=True)]


def _pieces(renderer: Renderer, demonstration: Demonstration, is_neutral: bool) -> list[tuple[str, bool]]:
    """The text in pieces, and whether the assistant speaks in each."""
    messages = demonstration.messages
    effort, name = None if is_neutral else demonstration.effort, f"demonstration {demonstration.id}"
    if demonstration.response is not None:
        return [(renderer.text(messages, effort, name, add_generation_prompt=True), False)]
    whole = renderer.text(messages, effort, name)
    pieces, at = [], 0
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        for upto, generates in ((i, True), (i + 1, False)):
            text = whole
            if generates or upto < len(messages):
                text = renderer.text(messages[:upto], effort, name, add_generation_prompt=generates)
            if not whole.startswith(text) or len(text) < at:
                raise UserError(
                    f"{name}: the student's chat template writes message {upto} differently when others follow it; "
                    "use a template that keeps what was said (thinking too), or demonstrations of one turn"
                )
            pieces.append((whole[at : len(text)], not generates))
            at = len(text)
    return pieces  # nothing is learnt from what follows the assistant's last message


def _continued(conversation: Conversation, response: Response | None) -> Conversation:
    """With the tokens that were sampled after the messages."""
    if response is None:
        return conversation
    return Conversation(
        conversation.token_ids + response.token_ids.tolist(), conversation.loss_mask + response.loss_mask.tolist()
    )


def _joined(pieces: Sequence[tuple[list[int], bool]], end_ids: frozenset[int]) -> Conversation:
    token_ids: list[int] = []
    loss_mask: list[bool] = []
    for ids, spoken in pieces:
        ends = [k for k, token in enumerate(ids, start=1) if token in end_ids]
        sampled = (ends[-1] if ends else len(ids)) if spoken else 0
        token_ids += ids
        loss_mask += [True] * sampled + [False] * (len(ids) - sampled)
    return Conversation(token_ids, loss_mask)
