"""The driver of supervised fine-tuning: draw demonstrations, render them, put them into the store. Nothing is sampled
and nothing scored, so there is no engine and no lane.

Promise: the batch of a step follows from the configuration and the step alone.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from megatron_mopd import build
from megatron_mopd.batch import Batch
from megatron_mopd.errors import UserError
from megatron_mopd.link import StepRequest
from megatron_mopd.prompts.conversation import Conversation, render_conversations
from megatron_mopd.prompts.demonstrations import Demonstration

NEUTRAL_STREAM = 3
"""Tells these draws apart from those of prompts/source.py, which come from the same seed."""


class Demonstrator:
    def __init__(self, parts: build.DemonstratorParts) -> None:
        self.parts, self.store = parts, parts.store

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def step(self, request: StepRequest) -> None:
        """Put the batch of `request.step` into the store."""
        p, config = self.parts, self.parts.config
        with p.trace.span("draw", "step", step=request.step):
            drawn = p.source.draw(request.step)
            rng = np.random.default_rng([config.run.seed, request.step, NEUTRAL_STREAM])
            is_neutral = (rng.random(len(drawn)) < config.demonstrations.neutral_fraction).tolist()
            conversations = render_conversations(p.renderer, drawn, is_neutral)
            self.check_lengths(drawn, conversations)
        index = {cell: i for i, cell in enumerate(config.prompts.cells)}
        batch = Batch.from_rows(
            [c.token_ids for c in conversations],
            [c.loss_mask for c in conversations],
            [index[demonstration.cell] for demonstration in drawn],
            config.prompts.cells,
        )
        rows = [
            {"id": d.id, "domain": d.domain, "effort": d.effort, "neutral": neutral, "tokens": len(c.token_ids)}
            for d, neutral, c in zip(drawn, is_neutral, conversations, strict=True)
        ]
        self.store.write_demonstrations(request.step, batch, rows)

    async def look_ahead(self, step: int) -> None:
        """Make the batch of a coming step while the trainer updates: it needs nothing of the trainer."""
        if step < self.parts.config.run.num_steps and not self.store.has(step):
            with suppress(UserError):  # said when that step is asked for
                await self.step(StepRequest(step, None, step))

    def check_lengths(self, drawn: list[Demonstration], conversations: list[Conversation]) -> None:
        for demonstration, conversation in zip(drawn, conversations, strict=True):
            if (tokens := len(conversation.token_ids)) > self.parts.max_tokens:
                raise UserError(
                    f"demonstration {demonstration.id} has {tokens} tokens, and the student's max_position_embeddings "
                    f"is {self.parts.max_tokens}; remove it"
                )
