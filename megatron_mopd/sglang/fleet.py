"""Servers that serve the same weights: which one takes a request, and what happens when one dies.

A request goes to the server that holds its prefix, unless that one is much busier than the idlest; no server has more
than `max_requests` in flight, and who finds all of them full waits its turn. A server that stops answering gets no work
until it answers again and `prepare` has accepted it (right model, current weights); its requests go to the others, or
wait for it, at most `recovery_timeout_s`.

Promise: `run` returns the result of exactly one completed call of its work, or raises an error that names the work, the
server and the reason. Other servers' requests never wait for a dead one.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import numpy as np

from megatron_mopd.errors import UserError
from megatron_mopd.sglang.client import Client, ServerDown

MAX_ATTEMPTS = 5
"""Servers that one request may bring down, or find dead, before it is given up."""
_PROBE_INTERVAL_S = 0.5
_PROBE_SILENCE_S = 10.0
_IMBALANCE = 16
"""A server is too busy for its own prefixes when it has this many requests more than the idlest."""

Result = TypeVar("Result")


class Server:
    """One server as the fleet sees it."""

    def __init__(self, url: str):
        self.url = url
        self.up = False
        self.in_flight = 0
        self.why_down = "it has not answered yet"


class Fleet:
    """`name` says in messages what the servers are for. `prepare(url)` runs before a server gets (new) work, each time
    that it was down; it raises ServerDown to try again later, UserError to end the run."""

    def __init__(
        self,
        name: str,
        client: Client,
        urls: Sequence[str],
        prepare: Callable[[str], Awaitable[None]],
        *,
        max_requests: int,
        start_timeout_s: float,
        recovery_timeout_s: float,
    ):
        self.name = name
        self.servers = [Server(url) for url in urls]
        self._client, self._prepare, self._max_requests = client, prepare, max_requests
        self._start_timeout_s, self._recovery_timeout_s = start_timeout_s, recovery_timeout_s
        self._home: dict[str, Server] = {}
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._watches: dict[Server, asyncio.Task[None]] = {}
        self._failure: UserError | None = None

    @property
    def urls(self) -> list[str]:
        """The servers that take work now."""
        return [server.url for server in self.servers if server.up]

    async def start(self) -> None:
        """Return once every server answers and is prepared. Raises UserError naming those that are not."""
        for server in self.servers:
            self._watch(server)
        await asyncio.wait(self._watches.values(), timeout=self._start_timeout_s)
        self._raise_failure()
        for server in self.servers:
            if not server.up:
                raise UserError(
                    f"{self.name} server {server.url} is not ready after {self._start_timeout_s:g} s "
                    f"(sglang.start_timeout_s): {server.why_down}"
                )

    async def run(
        self, what: str, work: Callable[[str], Awaitable[Result]], *, key: str = "", prefix: Sequence[int] = ()
    ) -> Result:
        """Call `work(url)` on a server; where that one dies, call it again on the next.

        `what` names the work in errors. Requests of the same `key` stay on one server; a new key starts where its
        `prefix` of token ids belongs.
        """
        for _ in range(MAX_ATTEMPTS):
            server = await self._take(what, key, prefix)
            try:
                return await work(server.url)
            except ServerDown as error:
                self.mark_down(server.url, error.reason)
                last = error
            finally:
                server.in_flight -= 1
                self._wake(1)
        raise UserError(f"{what}: {self.name} servers died {MAX_ATTEMPTS} times under it; last: {last}")

    def mark_down(self, url: str, reason: str) -> None:
        """Give the server no work until it answers again."""
        server = next(s for s in self.servers if s.url == url)
        if server.up:
            server.up, server.why_down = False, reason
            self._home = {key: home for key, home in self._home.items() if home is not server}
            self._watch(server)

    def forget_prefixes(self) -> None:
        """After an update of the weights no server holds anything that is still of use."""
        self._home = {}

    async def close(self) -> None:
        for watch in self._watches.values():
            watch.cancel()
        await asyncio.gather(*self._watches.values(), return_exceptions=True)

    async def _take(self, what: str, key: str, prefix: Sequence[int]) -> Server:
        """A server with room, its place taken."""
        dead_since: float | None = None
        while True:
            self._raise_failure()
            if server := self._choose(key, prefix):
                server.in_flight += 1
                if key:
                    self._home[key] = server
                return server
            if self.urls:
                dead_since = None
            else:
                dead_since = dead_since or time.monotonic()
                if time.monotonic() - dead_since > self._recovery_timeout_s:
                    reasons = "; ".join(f"{s.url}: {s.why_down}" for s in self.servers)
                    raise UserError(
                        f"{what}: no {self.name} server came back within {self._recovery_timeout_s:g} s "
                        f"(sglang.recovery_timeout_s); {reasons}"
                    )
            await self._wait_turn()

    async def _wait_turn(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await asyncio.wait_for(turn, 1.0 if not self.urls else None)
        except TimeoutError:
            return
        finally:
            if turn in self._waiting:
                self._waiting.remove(turn)

    def _choose(self, key: str, prefix: Sequence[int]) -> Server | None:
        free = [s for s in self.servers if s.up and s.in_flight < self._max_requests]
        if not free:
            return None
        idlest = min(free, key=lambda s: s.in_flight)
        home = self._home.get(key) or _rendezvous(prefix, [s for s in self.servers if s.up])
        return home if home in free and home.in_flight - idlest.in_flight < _IMBALANCE else idlest

    def _wake(self, count: int) -> None:
        while self._waiting and count:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                count -= 1

    def _watch(self, server: Server) -> None:
        self._watches[server] = asyncio.create_task(self._until_up(server))

    async def _until_up(self, server: Server) -> None:
        while not server.up:
            try:
                await self._client.get(server.url, "/server_info", _PROBE_SILENCE_S)  # the scheduler answers it
                await self._prepare(server.url)
                server.up = True
            except ServerDown as error:
                server.why_down = error.reason
                await asyncio.sleep(_PROBE_INTERVAL_S)
            except UserError as error:
                self._failure = error
                break
        self._wake(len(self._waiting))

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _rendezvous(prefix: Sequence[int], servers: Sequence[Server]) -> Server:
    """The server that these token ids hash to; only a dead server's prefixes move when it dies."""
    token_bytes = np.asarray(prefix, np.int64).tobytes()
    return max(servers, key=lambda s: hashlib.blake2b(token_bytes + s.url.encode(), digest_size=8).digest())
