"""An asyncio loop whose clock jumps to the next timer: hours of a cluster in seconds, in the same order every time."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class _Jumping(selectors.DefaultSelector):
    """Waits for nobody: time passes instead. What is ready (the loop's own pipe) is still seen."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everybody waits, and no timer is set")
        self.loop.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """`now` in seconds, from 0."""

    def __init__(self) -> None:
        selector = _Jumping()
        selector.loop = self
        self.now = 0.0
        super().__init__(selector)

    def time(self) -> float:
        return self.now


def run(main: Any) -> Any:
    """asyncio.run on a virtual clock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
