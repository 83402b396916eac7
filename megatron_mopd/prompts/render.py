"""Rendering: messages to token ids through the student's own chat template, once; what is sampled is never
re-tokenized.

The student reads the effort level through the template variable `prompts.effort_variable`; the teacher of a cell is
that effort level, so its prompt is rendered without the variable (eq. 15: pi_T(y | x) against pi_theta(y | e, x)).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

from megatron_mopd.types import Prompt, RenderedPrompt


class Renderer:
    def __init__(self, checkpoint: Path, effort_variable: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True, trust_remote_code=False)
        self._effort_variable = effort_variable

    def render(self, prompts: Sequence[Prompt]) -> list[RenderedPrompt]:
        student_ids = self._encode([self._text(p, {self._effort_variable: p.effort}) for p in prompts])
        teacher_ids = self._encode([self._text(p, {}) for p in prompts])
        return [
            RenderedPrompt(p, tuple(s), tuple(t)) for p, s, t in zip(prompts, student_ids, teacher_ids, strict=True)
        ]

    def _text(self, prompt: Prompt, variables: dict[str, str]) -> str:
        messages = [dict(m) for m in prompt.messages]
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **variables)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"]
