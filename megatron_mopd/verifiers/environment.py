"""The environment of tasks that are one answer: no observations, then a verdict by a named verifier.

What such a trajectory spends are its thinking tokens: those sampled up to `end_of_thinking`, or all of them if it
never stops thinking or the option is null.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_mopd.errors import UserError
from megatron_mopd.protocols import Observation
from megatron_mopd.types import Outcome, Prompt, Trajectory
from megatron_mopd.verifiers.load import check, judge, load_verifier


class VerifiedTurn:
    """See `megatron_mopd.verifiers` for the verifiers and their options."""

    def __init__(
        self,
        prompt: Prompt,
        tokenizer: Any,
        *,
        verifier: str,
        verifier_options: Mapping[str, Any] | None = None,
        end_of_thinking: str | None = None,
    ) -> None:
        """Args:
        end_of_thinking: the token after which the answer begins, such as '</think>'.
        """
        self._prompt, self._tokenizer, self._name = prompt, tokenizer, verifier
        self._verifier = load_verifier(verifier, verifier_options or {})
        check(verifier, self._verifier, prompt)
        self._end_id = None if end_of_thinking is None else _token_id(tokenizer, end_of_thinking)
        self.stop_token_ids = (tokenizer.eos_token_id,)

    @classmethod
    def check_prompt(
        cls, prompt: Prompt, *, verifier: str, verifier_options: Mapping[str, Any] | None = None, **_: object
    ) -> None:
        check(verifier, load_verifier(verifier, verifier_options or {}), prompt)

    async def step(self, token_ids: tuple[int, ...]) -> Observation:
        return Observation((), done=True)

    async def snapshot(self) -> dict[str, Any]:
        return {}

    async def restore(self, state: dict[str, Any]) -> None:
        """There is nothing but the prompt."""

    async def score(self, trajectory: Trajectory) -> Outcome:
        ids = trajectory.response_ids.tolist()
        thinking = ids.index(self._end_id) + 1 if self._end_id in ids else len(ids)
        answer_ids = ids if self._end_id is None else ids[thinking:]
        answer = self._tokenizer.decode(answer_ids, skip_special_tokens=True)
        reward = await judge(self._name, self._verifier, self._prompt, answer)
        return Outcome(reward, int(trajectory.loss_mask[:thinking].sum()))


def _token_id(tokenizer: Any, token: str) -> int:
    found = tokenizer.get_vocab().get(token)
    if found is None:
        raise UserError(f"end_of_thinking={token!r} is no token of the student's vocabulary")
    return found
