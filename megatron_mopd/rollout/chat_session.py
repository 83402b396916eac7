"""One conversation of an external client with the student, as one trajectory.

    prompt        the messages and tools of the first request, rendered
    segments      [ sampled (mask 1) | what the client said next, rendered (mask 0) | sampled | ... ]

Promises (tests/unit/test_chat_session.py, tests/contract/test_external_client.py): token ids are appended as they were
sampled and never tokenized again; a request that does not continue what was said is refused and changes nothing; the
same request again gets the same answer, whether its client had hung up, and is never sampled twice; an interrupted turn
goes on from its log, with each stretch under its own weight version; sampled and observed tokens never exceed the
budget.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_mopd.errors import UserError
from megatron_mopd.prompts.history import first_difference
from megatron_mopd.prompts.render import Renderer
from megatron_mopd.prompts.spelling import Spelling
from megatron_mopd.protocols import RolloutEngine, SampleRequest
from megatron_mopd.rollout.chat_history import new_messages
from megatron_mopd.rollout.chat_request import Call, ChatRequest, Message, Refused
from megatron_mopd.rollout.tool_calls import ToolCall, Turn, TurnParser
from megatron_mopd.types import Prompt, RenderedPrompt, Segment, Trajectory

TOO_LONG = "context_length_exceeded"


@dataclass(frozen=True)
class Speaker:
    """What every session samples and renders with."""

    engine: RolloutEngine
    renderer: Renderer
    spelling: Spelling
    parser: TurnParser
    arguments_as_text: bool
    max_response_tokens: int
    max_tokens: int
    """Prompt and response together."""
    temperature: float = 1.0
    top_p: float = 1.0
    """What the engine samples with."""


@dataclass(frozen=True)
class Answer:
    """A turn, for the client. `num_prompt_tokens` is all that the student had read."""

    message: Message
    finish_reason: str  # stop | length | tool_calls
    num_prompt_tokens: int
    num_sampled_tokens: int


@dataclass
class _Asked:
    """A request that has been taken: its messages as they were sent, and what becomes of it."""

    messages: tuple[Message, ...]
    max_tokens: int | None
    task: asyncio.Task[Answer]


class Session:
    """`key` names it to clients, `id` is the trajectory's."""

    def __init__(self, key: str, trajectory_id: str, prompt: Prompt, speaker: Speaker):
        self.key, self.id, self.prompt = key, trajectory_id, prompt
        self.rerendered: Counter[str] = Counter()
        """Turns by what the template makes of them: exact, other_tokens, other_text."""
        self.num_bad_calls = 0
        self._speaker = speaker
        self._rendered: RenderedPrompt | None = None
        self._tools: tuple[Mapping[str, Any], ...] = ()
        self._messages: tuple[Message, ...] = ()
        self._text = ""
        """Of the messages, as the template writes them; while the student speaks, up to where it begins."""
        self._token_ids: list[int] = []
        self._begin = 0
        """Where the current turn begins in them."""
        self._segments: list[Segment] = []
        self._routed = self._num_turns = 0
        self._asked: _Asked | None = None
        self._over: str | None = None

    def ask(self, request: ChatRequest) -> asyncio.Future[Answer]:
        """What is to be awaited; cancelling it stops nothing. Raises Refused, before anything has changed."""
        if self._over is not None and (self._asked is None or request.messages != self._asked.messages):
            raise Refused(400, f"this conversation is over: {self._over}", TOO_LONG)
        self._check_options(request)
        if self._asked is None or request.messages != self._asked.messages:
            if self._asked is not None and not _is_answered(self._asked.task):
                raise Refused(409, "the answer to another request is not there yet", "session_busy")
            self._take(request)
            self._asked = _Asked(request.messages, request.max_tokens, self._speaking(request.max_tokens))
        elif self._asked.task.done() and not _is_answered(self._asked.task):  # the engine failed: go on from the log
            self._asked.task = self._speaking(self._asked.max_tokens)
        return asyncio.shield(self._asked.task)

    def cancel(self) -> None:
        if self._asked is not None:
            self._asked.task.cancel()

    async def end(self) -> Trajectory | None:
        """Stop. The whole of it, None if nothing was sampled. Raises what the engine raised if that came last."""
        asked = self._asked
        if asked is not None and not asked.task.done():
            asked.task.cancel()
            await asyncio.wait([asked.task])
        if asked is not None and not asked.task.cancelled() and (error := asked.task.exception()) is not None:
            raise error
        if self._rendered is None or not any(any(segment.loss_mask) for segment in self._segments):
            return None
        is_whole = asked is not None and _is_answered(asked.task) and self._over is None
        self._over = self._over or "it was ended"
        return Trajectory(self.id, self._rendered, tuple(self._segments), "stop" if is_whole else "length")

    def _check_options(self, request: ChatRequest) -> None:
        for name in ("temperature", "top_p"):
            asked, fixed = getattr(request, name), getattr(self._speaker, name)
            if asked is not None and asked != fixed:
                raise Refused(400, f"{name}: it is {fixed:g} here; leave it out", "unsupported_value", name)
        if request.effort is not None and request.effort != self.prompt.effort:
            raise Refused(400, f"reasoning_effort: it is {self.prompt.effort or 'none'} here", None, "reasoning_effort")
        if request.tools and not self._speaker.parser.has_tools:
            raise Refused(400, "tools: the student's tokenizer has no tokens for calls", None, "tools")
        if self._rendered is not None and list(request.tools) != list(self._tools):
            raise Refused(400, "tools: others were declared when the conversation began", "tools_changed", "tools")

    def _take(self, request: ChatRequest) -> None:
        if self._rendered is None:
            self._take_prompt(request)
        else:
            self._observe(request)

    def _take_prompt(self, request: ChatRequest) -> None:
        student = self._render(request.messages, request.tools, self.prompt.effort or None, generates=True)
        teacher = self._render(request.messages, request.tools, None, generates=True)
        student_ids, teacher_ids = self._speaker.spelling.encode([student, teacher])
        if not student_ids or len(student_ids) >= self._speaker.max_tokens:
            n, most = len(student_ids), self._speaker.max_tokens
            raise Refused(400, f"the prompt has {n} tokens, the student reads {most}", TOO_LONG, "messages")
        rows = tuple(message.for_template(self._speaker.arguments_as_text) for message in request.messages)
        metadata = {**self.prompt.metadata, **({"tools": list(request.tools)} if request.tools else {})}
        prompt = replace(self.prompt, messages=rows, metadata=metadata)
        self._rendered = RenderedPrompt(prompt, tuple(student_ids), tuple(teacher_ids))
        self._messages, self._tools, self._text = request.messages, request.tools, student
        self._token_ids, self._begin = student_ids, len(student_ids)

    def _observe(self, request: ChatRequest) -> None:
        """Append what the client says next, with what the template writes between the turns."""
        messages = self._messages + new_messages(self._messages, request.messages)
        effort = self.prompt.effort or None
        said = self._render(self._messages, self._tools, effort)
        text = self._render(messages, self._tools, effort, generates=True)
        if not text.startswith(said):
            raise Refused(400, "the chat template writes what was said in another way once more follows", "template")
        between = said.rpartition(self._end_text)[2]
        (token_ids,) = self._speaker.spelling.encode([between + text[len(said) :]])
        if len(self._token_ids) + len(token_ids) >= self._most:
            self._over = f"its {self._most} tokens are spent"
            raise Refused(400, f"this conversation is over: {self._over}", TOO_LONG, "messages")
        self._segments.append(Segment.observation(token_ids, self._segments[-1].weight_version))
        self._token_ids += token_ids
        self._messages, self._text, self._begin = messages, text, len(self._token_ids)

    def _speaking(self, max_tokens: int | None) -> asyncio.Task[Answer]:
        task = asyncio.create_task(self._speak(max_tokens))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, even if nobody waits
        return task

    async def _speak(self, max_tokens: int | None) -> Answer:
        most = min(self._most, self._begin + (max_tokens or self._most))
        reason = "length"
        while len(self._token_ids) < most:
            segment = await self._speaker.engine.generate(self._request(most))
            if segment.token_ids:
                self._segments.append(segment)
            self._token_ids += segment.token_ids
            self._routed += 0 if segment.routed_experts is None else len(segment.routed_experts)
            if segment.finish_reason != "abort":
                reason = segment.finish_reason
                break
        return self._heard(self._token_ids[self._begin :], reason)

    def _request(self, most: int) -> SampleRequest:
        left, stops = most - len(self._token_ids), tuple(self._speaker.renderer.end_ids)
        return SampleRequest(self.id, tuple(self._token_ids), left, stops, self._routed)

    def _heard(self, sampled: list[int], reason: str) -> Answer:
        """Record what the student has said."""
        turn = self._speaker.parser.parse(sampled)
        self._num_turns += 1
        message = _message(turn, self._num_turns)
        self._messages += (message,)
        self.num_bad_calls += len(turn.bad_calls)
        if reason == "length":
            self._over = "a turn reached its limit, or the trajectory its own"
        else:
            self.rerendered[self._compare(sampled)] += 1
            reason = "tool_calls" if message.calls else "stop"
        return Answer(message, reason, self._begin, len(sampled))

    def _compare(self, sampled: Sequence[int]) -> str:
        """What the template makes of the last turn; see prompts/history.py."""
        try:
            text = self._render(self._messages, self._tools, self.prompt.effort or None)
        except Refused:
            return "other_text"
        if not text.startswith(self._text):
            return "other_text"
        spoken = text[len(self._text) :].rpartition(self._end_text)
        (rendered,) = self._speaker.spelling.encode([spoken[0] + spoken[1]])
        if first_difference(sampled, rendered) is None:
            return "exact"
        decode = self._speaker.renderer.tokenizer.decode
        return "other_tokens" if decode(rendered) == decode(list(sampled)) else "other_text"

    @property
    def _most(self) -> int:
        """Tokens that the whole of it may have."""
        assert self._rendered is not None
        prompt = len(self._rendered.student_ids)
        return min(prompt + self._speaker.max_response_tokens, self._speaker.max_tokens)

    @property
    def _end_text(self) -> str:
        (end,) = self._speaker.renderer.end_ids
        return self._speaker.renderer.tokenizer.convert_ids_to_tokens(end)

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        effort: str | None,
        generates: bool = False,
    ) -> str:
        cut, speaker = self._speaker.spelling.cut, self._speaker
        try:
            rows = cut([message.for_template(speaker.arguments_as_text) for message in messages])
            return speaker.renderer.text(rows, effort, "these messages", generates, cut(list(tools)))
        except (UserError, RecursionError) as error:
            raise Refused(400, str(error), "template", "messages") from None


def _is_answered(task: asyncio.Task[Answer]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _message(turn: Turn, number: int) -> Message:
    """For the client; a call that is none is shown as it was written."""
    good = [call for call in turn.calls if isinstance(call, ToolCall)]
    calls = tuple(Call(f"call_{number}_{i}", call.name, call.text) for i, call in enumerate(good, start=1))
    shown = [turn.content or "", *(call.text for call in turn.bad_calls)]
    content = turn.content if not turn.bad_calls else "\n".join(filter(None, shown))
    return Message("assistant", content, turn.reasoning, calls)
