"""The verifiers and the tool of the quickstart world, one environment per domain (protocols.Environment).

What a trajectory spends are its thinking tokens: the sampled words before `<answer>` (general, agents; what the tool
returns is free), or the comments (coding).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
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


class Thinking(ABC):
    """One turn, then a verdict of 0 or 1 on the answer alone, beside the thinking tokens that it took."""

    def __init__(self, prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> None:
        self.prompt = prompt
        self.words = _words(tokenizer)
        self.stop_token_ids: tuple[int, ...] = (self.words.index(EOS),)

    async def step(self, token_ids: tuple[int, ...]) -> Observation:
        return Observation((), done=True)

    async def score(self, trajectory: Trajectory) -> Outcome:
        words = [self.words[i] for i in trajectory.response_ids]
        correct, spent_tokens = self.judge(words, trajectory.loss_mask.tolist())
        return Outcome(float(correct), spent_tokens)

    @abstractmethod
    def judge(self, words: Sequence[str], sampled: Sequence[bool]) -> tuple[bool, int]:
        """(correct, thinking tokens) of a response, which is complete if its last word is `<eos>`."""


class Sums(Thinking):
    """`<answer>` and the label must end the response."""

    def judge(self, words: Sequence[str], sampled: Sequence[bool]) -> tuple[bool, int]:
        return judge_answer(words, sampled, self.prompt.label)


class KeyTable(Thinking):
    """A lookup tool: `<call> KEY` returns the table's value for KEY, a key without a call returns `<error>`.

    The keys are stop ids, so that the engine hands every call over at once. `<call>` before another word calls nothing.
    """

    def __init__(self, prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(prompt, tokenizer)
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


class StackPrograms(Thinking):
    """The response without its comments is a program; the label is a list of [input, expected output]."""

    def judge(self, words: Sequence[str], sampled: Sequence[bool]) -> tuple[bool, int]:
        code = [word for word in words if word not in COMMENTS and word != EOS]
        passes = all(run_program(code, value) == expected for value, expected in self.prompt.label)
        return passes and words[-1] == EOS, sum(word in COMMENTS for word in words)


def judge_answer(words: Sequence[str], sampled: Sequence[bool], label: str) -> tuple[bool, int]:
    thinking = words.index(ANSWER) if ANSWER in words else len(words)
    return list(words[thinking + 1 :]) == [label, EOS], sum(sampled[:thinking])
