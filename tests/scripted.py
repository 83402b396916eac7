"""A rollout engine that says what a script holds: the texts of each trajectory's turns, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_mopd.prompts.render import Renderer
from megatron_mopd.protocols import KvUse, SampleRequest
from megatron_mopd.types import Segment


class ScriptedTexts:
    """`piece` tokens at a time, then an abort; each piece is of a weight version of its own."""

    weight_version = 0

    def __init__(self, renderer: Renderer, texts: Sequence[str], piece: int = 0):
        self.kv = KvUse()
        self._renderer, self._texts, self._piece = renderer, list(texts), piece
        self._left: dict[str, list[list[int]]] = {}
        self.asked: list[SampleRequest] = []
        self.sampled: dict[str, list[Segment]] = {}
        self.may_speak = asyncio.Event()
        self.may_speak.set()
        self.error: Exception | None = None

    async def start(self) -> None: ...

    async def generate(self, request: SampleRequest) -> Segment:
        self.asked.append(request)
        await asyncio.sleep(0)  # as one that computes would
        await self.may_speak.wait()
        if self.error is not None:
            raise self.error
        turns = self._left.setdefault(request.trajectory_id, self._renderer.encode(self._texts))
        said = turns[0][: min(request.max_new_tokens, self._piece or len(turns[0]))]
        turns[0] = turns[0][len(said) :]
        ended = said[-1] in request.stop_token_ids
        if ended:
            turns.pop(0)
        reason = "stop" if ended else "length" if len(said) == request.max_new_tokens else "abort"
        segment = Segment(tuple(said), (-0.5,) * len(said), (True,) * len(said), self.weight_version, reason)
        self.weight_version += bool(self._piece)
        self.sampled.setdefault(request.trajectory_id, []).append(segment)
        return segment

    async def interrupt(self) -> None: ...

    async def update_weights(self, folder: Path | None, weight_version: int) -> None: ...

    async def close(self) -> None: ...


def by_trajectory(segments: Mapping[str, Sequence[Segment]]) -> dict[str, list[int]]:
    return {name: [token for s in of_one for token in s.token_ids] for name, of_one in segments.items()}
