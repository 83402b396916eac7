"""Answer match: the text of an answer against the prompt's label.

Promise: an answer is never evaluated; numbers are compared as exact fractions, so 0.50, 1/2 and 5e-1 are equal.
"""

from __future__ import annotations

import re
from fractions import Fraction

from megatron_mopd.errors import UserError
from megatron_mopd.types import Prompt

COMPARISONS = ("text", "number")
MAX_NUMBER_CHARACTERS = 64
"""A longer one, or 1e999999999, is no answer: its fraction alone would take minutes."""
MAX_EXPONENT = 100


class AnswerMatch:
    """1.0 if what the answer says is one of the label's answers."""

    def __init__(self, *, pattern: str | None = None, compare: str = "text") -> None:
        r"""Args:
        pattern: regular expression with one group; its last match in the text is the answer, for example
            '\\boxed\{([^}]*)\}'. None: the whole text.
        compare: "text" up to white space, or "number".
        """
        if compare not in COMPARISONS:
            raise UserError(f"answer_match: compare={compare!r} must be one of {', '.join(COMPARISONS)}")
        try:
            self._pattern = None if pattern is None else re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise UserError(f"answer_match: pattern={pattern!r} is no regular expression: {error}") from None
        if self._pattern is not None and self._pattern.groups != 1:
            raise UserError(
                f"answer_match: pattern={pattern!r} needs one group, the answer; it has {self._pattern.groups}"
            )
        self._compare = compare

    def check(self, prompt: Prompt) -> None:
        answers = self._accepted(prompt)
        if not answers:
            raise ValueError("it has no label: a string, a number, or a list of them")
        if self._compare == "number":
            for answer in answers:
                if read_number(answer) is None:
                    raise ValueError(f"its label has {answer!r}, which is no number")

    async def verify(self, prompt: Prompt, answer: str) -> float:
        if self._pattern is not None:
            found = self._pattern.findall(answer)
            if not found:
                return 0.0
            answer = found[-1]
        return float(any(self._equal(answer, accepted) for accepted in self._accepted(prompt)))

    def _equal(self, answer: str, accepted: str) -> bool:
        if self._compare == "text":
            return answer.split() == accepted.split()
        number = read_number(answer)
        return number is not None and number == read_number(accepted)

    @staticmethod
    def _accepted(prompt: Prompt) -> list[str]:
        labels = prompt.label if isinstance(prompt.label, list) else [prompt.label]
        known = [x for x in labels if isinstance(x, str | int | float) and not isinstance(x, bool) and str(x).strip()]
        return [str(label) for label in known]


def read_number(text: str) -> Fraction | None:
    """'1,234', '-3/4', '2.5e3' or '$ 12' as a fraction; None for anything else."""
    text = text.strip().lstrip("$").strip().removesuffix(".").replace(",", "")
    exponent = re.search(r"[eE]([+-]?\d+)$", text)
    if len(text) > MAX_NUMBER_CHARACTERS or (exponent and abs(int(exponent[1])) > MAX_EXPONENT):
        return None
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None
