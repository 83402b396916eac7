"""Turns at a server that can hold the weights of one teacher at a time.

Promises (tests/unit/test_turns.py): whoever holds the server at one time asked for the same teacher; the server changes
hands only when nobody holds it; then those who have waited longest come first, with all who wait for the same teacher.
Work that arrives for the teacher that is loaded joins it, so that weights are loaded as rarely as possible, but others
let at most `PATIENCE` such newcomers pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

PATIENCE = 256


class Turns:
    """A lock that holders of one key share."""

    def __init__(self) -> None:
        self._key: str | None = None
        self._holders = 0
        self._passed = 0
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def hold(self, key: str) -> AsyncIterator[None]:
        await self._acquire(key)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, key: str) -> None:
        if key == self._key and self._passed < PATIENCE:
            self._holders += 1
            self._passed += bool(self._waiting)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((key, turn))
        self._pass_on()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release()
            raise

    def _release(self) -> None:
        self._holders -= 1
        self._pass_on()

    def _pass_on(self) -> None:
        """Hand a server that nobody holds to the one who has waited longest, and all of the same key."""
        self._waiting = [(key, turn) for key, turn in self._waiting if not turn.done()]
        if self._holders or not self._waiting:
            return
        self._key, self._passed = self._waiting[0][0], 0
        admitted = [turn for key, turn in self._waiting if key == self._key]
        self._waiting = [(key, turn) for key, turn in self._waiting if key != self._key]
        self._holders = len(admitted)
        for turn in admitted:
            turn.set_result(None)
