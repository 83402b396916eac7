"""The verifiers and the tool of the quickstart world, one environment per domain (protocols.Environment).

The budget of a trajectory is floor(scale of its effort * base), both from `environments.<name>.options`. What it spends
are its thinking tokens: the sampled words before `<answer>` (general, agents; what the tool returns is free), or the
comments (coding).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from examples.quickstart.tasks import ANSWER, CALL, EOS, ERROR, LETTERS, OPERATIONS, run_program
from megatron_mopd.protocols import Observation
from megatron_mopd.types import Outcome, Prompt, Trajectory

COMMENTS = frozenset((*LETTERS, *OPERATIONS))


@lru_cache(maxsize=4)
def _words(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """The word of each token id. Kept per tokenizer, since there is an environment per trajectory."""
    return tuple(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))))


class BudgetedEnvironment(ABC):
    """One turn, then a verdict of 0 or 1 on the answer alone, beside the thinking tokens and their budget."""

    def __init__(
        self,
        prompt: Prompt,
        tokenizer: PreTrainedTokenizerBase,
        *,
        base_budget_tokens: int,
        budget_scales: Mapping[str, float],
    ) -> None:
        """Args:
        base_budget_tokens: b0, what the longest task needs.
        budget_scales: tau of each effort.
        """
        self.prompt = prompt
        self.words = _words(tokenizer)
        self.budget_tokens = math.floor(budget_scales[prompt.effort] * base_budget_tokens)
        self.stop_token_ids: tuple[int, ...] = (self.words.index(EOS),)

    async def step(self, token_ids: tuple[int, ...]) -> Observation:
        return Observation((), done=True)

    async def score(self, trajectory: Trajectory) -> Outcome:
        words = [self.words[i] for i in trajectory.response_ids]
        correct, spent_tokens = self.judge(words, trajectory.loss_mask.tolist())
        return Outcome(float(correct), spent_tokens, self.budget_tokens)

    @abstractmethod
    def judge(self, words: Sequence[str], sampled: Sequence[bool]) -> tuple[bool, int]:
        """(correct, thinking tokens) of a response, which is complete if its last word is `<eos>`."""


class Sums(BudgetedEnvironment):
    """`<answer>` and the label must end the response."""

    def judge(self, words: Sequence[str], sampled: Sequence[bool]) -> tuple[bool, int]:
        return judge_answer(words, sampled, self.prompt.label)


class KeyTable(BudgetedEnvironment):
    """A lookup tool: `<call> KEY` returns the table's value for KEY, a key without a call returns `<error>`.

    The keys are stop ids, so that the engine hands every call over at once. `<call>` before another word calls nothing.
    """

    def __init__(self, prompt: Prompt, tokenizer: PreTrainedTokenizerBase, **options) -> None:
        super().__init__(prompt, tokenizer, **options)
        table = prompt.metadata["table"]
        self._value_ids = {self.words.index(key): self.words.index(value) for key, value in table.items()}
        self._call_id, self._error_id = self.words.index(CALL), self.words.index(ERROR)
        self.stop_token_ids += tuple(self._value_ids)

    async def step(self, token_ids: tuple[int, ...]) -> Observation:
        if token_ids[-1] not in self._value_ids:
            return Observation((), done=True)
        is_call = token_ids[-2:-1] == (self._call_id,)
        return Observation((self._value_ids[token_ids[-1]] if is_call else self._error_id,), done=False)

    def judge(self, words: Sequence[str], sampled: Sequence[bool]) -> tuple[bool, int]:
        return judge_answer(words, sampled, self.prompt.label)


class StackPrograms(BudgetedEnvironment):
    """The response without its comments is a program; the label is a list of [input, expected output]."""

    def judge(self, words: Sequence[str], sampled: Sequence[bool]) -> tuple[bool, int]:
        code = [word for word in words if word not in COMMENTS and word != EOS]
        passes = all(run_program(code, value) == expected for value, expected in self.prompt.label)
        return passes and words[-1] == EOS, sum(word in COMMENTS for word in words)


def judge_answer(words: Sequence[str], sampled: Sequence[bool], label: str) -> tuple[bool, int]:
    thinking = words.index(ANSWER) if ANSWER in words else len(words)
    return list(words[thinking + 1 :]) == [label, EOS], sum(sampled[:thinking])
