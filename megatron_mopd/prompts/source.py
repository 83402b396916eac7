"""The mixture: which prompts, or demonstrations, a step trains on.

Promises: step k draws the same prompts whatever ran before it (the position in every pool follows from the counts
of steps 0..k-1, which are replayed, so a resume needs no state but the step); each (domain, effort) cell gets its
share of a step up to rounding, exactly in expectation; within a cell every prompt is drawn once before any is drawn
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from megatron_mopd.config import Prompts
from megatron_mopd.errors import UserError
from megatron_mopd.prompts.demonstrations import Demonstration
from megatron_mopd.types import Cell, Prompt

Drawn = TypeVar("Drawn", Prompt, Demonstration)


class Place(NamedTuple):
    """In the sequence of all draws. Of a prompt, its position in its draw; of what comes next, how many of the draw are
    taken."""

    step: int
    position: int


class PromptSource(Generic[Drawn]):
    """Draws `config.batch_size` prompts, or demonstrations, per step from the pools of the cells."""

    def __init__(self, prompts: Sequence[Drawn], config: Prompts, seed: int, kind: str = "prompt") -> None:
        self._cells = config.cells
        self._pools = {cell: cell_pool(prompts, cell, kind) for cell in self._cells}
        self._seed = seed
        shares = np.array([config.mixture[c.domain] * config.efforts[c.effort] for c in self._cells])
        self._quota_upto = np.cumsum(shares / shares.sum()) * config.batch_size
        self._quota_upto[-1] = config.batch_size
        self._drawn = np.zeros(len(self._cells), np.int64)
        self._step = 0
        self._orders: dict[int, tuple[int, np.ndarray]] = {}

    def draw(self, step: int) -> list[Drawn]:
        """The prompts of `step`, grouped by cell, each with its effort."""
        if step < self._step:
            self._drawn[:], self._step = 0, 0
        while self._step < step:
            self._drawn += self._counts(self._step)
            self._step += 1
        return [
            self._pick(c, int(self._drawn[c]) + k)
            for c, count in enumerate(self._counts(step))
            for k in range(int(count))
        ]

    def take(self, place: Place, count: int) -> tuple[list[tuple[Place, Drawn]], Place]:
        """The next `count` prompts of the sequence draw(0), draw(1), ..., each with its place in it, and where to go
        on. What is taken of a draw in part is a random part, so that no cell comes first; it is in the draw's order.
        """
        taken: list[tuple[Place, Drawn]] = []
        while len(taken) < count:
            drawn = self.draw(place.step)
            order = np.random.default_rng([self._seed, place.step, 4]).permutation(len(drawn))
            end = min(len(drawn), place.position + count - len(taken))
            taken += [(Place(place.step, i), drawn[i]) for i in sorted(order[place.position : end].tolist())]
            place = Place(place.step, end) if end < len(drawn) else Place(place.step + 1, 0)
        return taken, place

    def _counts(self, step: int) -> np.ndarray:
        """Prompts per cell by systematic sampling: floor or ceiling of each quota, their sum exact."""
        start = np.random.default_rng([self._seed, step, 1]).random()
        return np.diff(np.floor(self._quota_upto + start).astype(np.int64), prepend=0)

    def _pick(self, cell_index: int, position: int) -> Drawn:
        cell = self._cells[cell_index]
        pool = self._pools[cell]
        epoch, index = divmod(position, len(pool))
        order = self._order(cell_index, epoch, len(pool))
        return replace(pool[order[index]], effort=cell.effort)

    def _order(self, cell_index: int, epoch: int, size: int) -> np.ndarray:
        """The order in which `epoch` goes through the pool of a cell; the current one is kept."""
        kept = self._orders.get(cell_index)
        if kept is None or kept[0] != epoch:
            order = np.random.default_rng([self._seed, cell_index, epoch, 2]).permutation(size)
            kept = self._orders[cell_index] = (epoch, order)
        return kept[1]


def cell_pool(prompts: Sequence[Drawn], cell: Cell, kind: str = "prompt") -> list[Drawn]:
    """Those that may be drawn for `cell`."""
    pool = [p for p in prompts if p.domain == cell.domain and p.effort in ("", cell.effort)]
    if not pool:
        raise UserError(
            f"no {kind} for {cell}; add some to {kind}s.files or remove it from prompts.mixture / prompts.efforts"
        )
    return pool
