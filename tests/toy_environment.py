"""An environment that a policy learns in a few steps: say one word of the first half of the vocabulary."""

from __future__ import annotations

from typing import Any

from megatron_mopd.protocols import Observation
from megatron_mopd.types import Outcome, Prompt, Trajectory

HALF = 24


class FirstHalf:
    def __init__(self, prompt: Prompt, tokenizer: Any) -> None:
        self.stop_token_ids = tuple(range(2 * HALF))

    async def step(self, token_ids: tuple[int, ...]) -> Observation:
        return Observation((), done=True)

    async def score(self, trajectory: Trajectory) -> Outcome:
        return Outcome(float(trajectory.response_ids[0] < HALF), 1)
