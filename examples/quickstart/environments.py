"""The verifiers and the tool of the quickstart world, one environment per domain (protocols.Environment).

What a trajectory spends are its thinking tokens: the sampled words before `<answer>` (general, agents; what the tool
returns is free), or the comments (coding).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

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

    async def snapshot(self) -> dict[str, Any]:
        return {}

    async def restore(self, state: dict[str, Any]) -> None:
        assert not state, "there is nothing but the prompt"

    async def score(self, trajectory: Trajectory) -> Outcome:
        words = [self.words[i] for i in trajectory.response_ids]
        return Outcome(await self.reward(words), self.spent(words, trajectory.loss_mask.tolist()))

    @abstractmethod
    async def reward(self, words: Sequence[str]) -> float:
        """Of a response, which is complete if its last word is `<eos>`."""

    def spent(self, words: Sequence[str], sampled: Sequence[bool]) -> int:
        """Its thinking tokens."""
        return sum(sampled[: words.index(ANSWER) if ANSWER in words else len(words)])


class Sums(Thinking):
    """`<answer>` and the label must end the response."""

    async def reward(self, words: Sequence[str]) -> float:
        return float(is_answered(words, self.prompt.label))


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

    async def reward(self, words: Sequence[str]) -> float:
        return float(is_answered(words, self.prompt.label))


class StackPrograms(Thinking):
    """The response without its comments is a program; the label is a list of [input, expected output]."""

    async def reward(self, words: Sequence[str]) -> float:
        code = [word for word in words if word not in COMMENTS and word != EOS]
        passes = all(run_program(code, value) == expected for value, expected in self.prompt.label)
        return float(passes and words[-1] == EOS)

    def spent(self, words: Sequence[str], sampled: Sequence[bool]) -> int:
        return sum(word in COMMENTS for word in words)


def is_answered(words: Sequence[str], label: str) -> bool:
    return ANSWER in words and list(words[words.index(ANSWER) + 1 :]) == [label, EOS]
