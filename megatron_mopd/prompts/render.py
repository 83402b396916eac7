"""Rendering: messages to token ids through the student's own chat template, once; what is sampled is never
re-tokenized.

The student reads the effort level through the template variable `prompts.effort_variable`; the teacher of a cell is
that effort level, so its prompt is rendered without the variable (eq. 15: pi_T(y | x) against pi_theta(y | e, x)). With
no variable the student reads none either: so it becomes the teacher of a cell.

The template is that of the checkpoint folder or, with `prompts.chat_template=xtml`, the one beside this file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError
from transformers import AutoTokenizer

from megatron_mopd.config import Config
from megatron_mopd.errors import UserError
from megatron_mopd.prompts.xtml import END_OF_MSG, MARKERS, read_template
from megatron_mopd.types import Prompt, RenderedPrompt


class Renderer:
    """Raises UserError for a folder without a readable tokenizer, and for a prompt that its template refuses."""

    def __init__(
        self,
        checkpoint: Path,
        effort_variable: str | None,
        chat_template: Literal["checkpoint", "xtml"] = "checkpoint",
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise UserError(f"the tokenizer of {checkpoint} cannot be loaded: {error}") from error
        taken = inspect.signature(self.tokenizer.apply_chat_template).parameters
        if effort_variable in taken:
            raise UserError(f"prompts.effort_variable={effort_variable} is an argument of the template call; rename it")
        for name in variables or {}:
            if name in taken or name == effort_variable:
                raise UserError(f"prompts.template_variables.{name} is set by the template call; remove it")
        self.checkpoint, self.chat_template = checkpoint, chat_template
        self._effort_variable, self._variables = effort_variable, dict(variables or {})
        if chat_template == "xtml":
            self.tokenizer.chat_template = read_template()
            self._check_markers()

    @classmethod
    def of_student(cls, config: Config) -> Renderer:
        table = config.prompts
        return cls(config.student.checkpoint, table.effort_variable, table.chat_template, table.template_variables)

    def render(self, prompts: Sequence[Prompt]) -> list[RenderedPrompt]:
        teacher_ids = self._encode(prompts, lambda p: None)
        student_ids = teacher_ids
        if self._effort_variable is not None:
            student_ids = self._encode(prompts, lambda p: p.effort)
        return [
            RenderedPrompt(p, tuple(s), tuple(t)) for p, s, t in zip(prompts, student_ids, teacher_ids, strict=True)
        ]

    def render_neutral(self, prompts: Sequence[Prompt]) -> list[RenderedPrompt]:
        """Nobody reads an effort."""
        ids = self._encode(prompts, lambda p: None)
        return [RenderedPrompt(p, tuple(i), tuple(i)) for p, i in zip(prompts, ids, strict=True)]

    def text(
        self,
        messages: Sequence[Mapping[str, Any]],
        effort: str | None,
        name: str,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The template's rendering; `effort` None: without one. `name` says whose messages they are."""
        variables = {self._effort_variable: effort} if self._effort_variable is not None and effort is not None else {}
        try:
            return self.tokenizer.apply_chat_template(
                [dict(m) for m in messages],
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
                **variables,
            )
        except (ValueError, TypeError, TemplateError, RecursionError) as error:  # what templates and filters raise
            raise UserError(f"the student's chat template refuses {name}: {error}") from error

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Each by itself, without tokens that the template has not written."""
        return self.tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end an assistant's turn; none where the tokenizer names none."""
        if self.chat_template == "xtml":
            return frozenset({self.tokenizer.convert_tokens_to_ids(END_OF_MSG)})
        return frozenset() if self.tokenizer.eos_token_id is None else frozenset({self.tokenizer.eos_token_id})

    def _check_markers(self) -> None:
        """Each is one token, wherever it stands."""
        for marker, ids in zip(MARKERS, self.encode(MARKERS), strict=True):
            if len(ids) != 1 or ids[0] == self.tokenizer.unk_token_id:
                raise UserError(
                    f"prompts.chat_template=xtml: {marker} is no token of {self.checkpoint}; add {', '.join(MARKERS)} "
                    "to its tokenizer as special tokens, with ids below vocab_size"
                )

    def _encode(self, prompts: Sequence[Prompt], effort: Callable[[Prompt], str | None]) -> list[list[int]]:
        encoded = self.encode([self.text(p.messages, effort(p), f"prompt {p.id}", True) for p in prompts])
        for prompt, ids in zip(prompts, encoded, strict=True):
            if not ids:
                raise UserError(f"prompt {prompt.id} has no tokens in the student's vocabulary; remove it")
        return encoded
