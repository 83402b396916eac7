"""The router and the lanes of a run that scores nothing: what is submitted is graded at once, without log-probs of
anyone. So the driver's loop is one, whether outcomes alone are learnt from or teachers as well."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from megatron_mopd.trajectory_file import Sampled
from megatron_mopd.types import Cell, Graded


class NoTeacher:
    def __init__(self) -> None:
        self.held: list[Sampled] = []

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def route(self, cell: Cell) -> str:
        return ""

    def expect(self, counts: Mapping[str, int]) -> None: ...

    def submit(self, teacher: str, sampled: Sampled) -> None:
        self.held.append(sampled)

    async def drain(self, weight_version: int) -> list[Graded]:
        done, self.held = self.held, []
        return [Graded(s.trajectory, "", np.zeros(len(s.trajectory.response_ids), np.float32)) for s in done]
