"""Rendering: messages to token ids through the student's own chat template, once; what is sampled is never
re-tokenized.

The student reads the effort level through the template variable `prompts.effort_variable`; the teacher of a cell is
that effort level, so its prompt is rendered without the variable (eq. 15: pi_T(y | x) against pi_theta(y | e, x)). With
no variable the student reads none either: so it becomes the teacher of a cell.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer

from megatron_mopd.errors import UserError
from megatron_mopd.types import Prompt, RenderedPrompt


class Renderer:
    """Raises UserError for a folder without a readable tokenizer, and for a prompt that its template refuses."""

    def __init__(self, checkpoint: Path, effort_variable: str | None) -> None:
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise UserError(f"the tokenizer of {checkpoint} cannot be loaded: {error}") from error
        if effort_variable in inspect.signature(self.tokenizer.apply_chat_template).parameters:
            raise UserError(f"prompts.effort_variable={effort_variable} is an argument of the template call; rename it")
        self._effort_variable = effort_variable

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
        self, messages: Sequence[Mapping[str, Any]], effort: str | None, name: str, add_generation_prompt: bool = False
    ) -> str:
        """The template's rendering; `effort` None: without one. `name` says whose messages they are."""
        variables = {self._effort_variable: effort} if self._effort_variable is not None and effort is not None else {}
        try:
            return self.tokenizer.apply_chat_template(
                [dict(m) for m in messages], tokenize=False, add_generation_prompt=add_generation_prompt, **variables
            )
        except (ValueError, TypeError, TemplateError) as error:  # what templates raise, and what their filters do
            raise UserError(f"the student's chat template refuses {name}: {error}") from error

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Each by itself, without tokens that the template has not written."""
        return self.tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end an assistant's turn; none where the tokenizer names none."""
        return frozenset() if self.tokenizer.eos_token_id is None else frozenset({self.tokenizer.eos_token_id})

    def _encode(self, prompts: Sequence[Prompt], effort: Callable[[Prompt], str | None]) -> list[list[int]]:
        encoded = self.encode([self.text(p.messages, effort(p), f"prompt {p.id}", True) for p in prompts])
        for prompt, ids in zip(prompts, encoded, strict=True):
            if not ids:
                raise UserError(f"prompt {prompt.id} has no tokens in the student's vocabulary; remove it")
        return encoded
