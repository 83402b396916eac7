"""The environments of the miniature: those of the quickstart, judged by the project's verifiers.

| domain  | class         | verifier                             | label of a prompt                   |
|---------|---------------|--------------------------------------|-------------------------------------|
| general | Sums          | answer_match                         | the sum                             |
| agents  | KeyTable      | state_check                          | {"submitted": the end of the chain} |
| coding  | StackPrograms | unit_tests, in a sandbox of its own  | [[stdin, stdout], ...]              |

Thinking tokens are counted as in the quickstart. A response without its `<eos>` is not judged: it gets 0.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from examples.quickstart import environments as quickstart
from examples.quickstart.environments import COMMENTS
from examples.quickstart.tasks import ANSWER, EOS, run_program
from megatron_mopd.protocols import Execution
from megatron_mopd.types import Prompt
from megatron_mopd.verifiers.load import check, judge, load_verifier
from megatron_mopd.verifiers.unit_tests import UnitTests


class Verified(quickstart.Thinking):
    """Hands what a response ends with to a verifier."""

    def __init__(self, prompt: Prompt, tokenizer: PreTrainedTokenizerBase, *, verifier: str) -> None:
        super().__init__(prompt, tokenizer)
        self._name, self._verifier = verifier, load_verifier(verifier, {})
        check(verifier, self._verifier, prompt)

    @classmethod
    def check_prompt(cls, prompt: Prompt, *, verifier: str) -> None:
        check(verifier, load_verifier(verifier, {}), prompt)

    async def reward(self, words: Sequence[str]) -> float:
        if words[-1] != EOS:
            return 0.0
        return await judge(self._name, self._verifier, self.prompt, self.handed_in(words[:-1]))

    @abstractmethod
    def handed_in(self, words: Sequence[str]) -> Any:
        """What the verifier judges."""


class Sums(Verified, quickstart.Sums):
    def handed_in(self, words: Sequence[str]) -> str:
        return answer_of(words)


class KeyTable(Verified, quickstart.KeyTable):
    def handed_in(self, words: Sequence[str]) -> dict[str, str]:
        return {"submitted": answer_of(words)}


class StackPrograms(Verified, quickstart.StackPrograms):
    def handed_in(self, words: Sequence[str]) -> str:
        return " ".join(word for word in words if word not in COMMENTS)


class StackMachine:
    """A sandbox (protocols.Sandbox) of programs that can do nothing but count: in this process, in no time."""

    async def run(self, program: str, stdin: str) -> Execution:
        result = run_program(program.split(), int(stdin))
        return Execution("", "stack fault", 1) if result is None else Execution(str(result), "", 0)


class StackTests(UnitTests):
    """unit_tests of stack programs."""

    def __init__(self) -> None:
        super().__init__(sandbox=StackMachine())


def answer_of(words: Sequence[str]) -> str:
    """What follows the first `<answer>`."""
    return " ".join(words[words.index(ANSWER) + 1 :]) if ANSWER in words else ""
