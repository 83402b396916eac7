"""Endpoints that serve the same weights: which one takes a request, and what happens when one dies.

A request goes to the endpoint that holds its prefix, unless that one is much busier than the idlest; no endpoint has
more than `max_requests` in flight, and who finds all of them full waits its turn, first come, first served. Each
endpoint has a circuit breaker: one failure and it gets no work until `prepare` has accepted it again (it answers, is
the right one, has current weights); an endpoint that passes that and fails again is left alone for longer each time.
Its requests go to the others, or wait for it, at most `recovery_timeout_s`.

Promises (tests/unit/test_fleet.py): `run` returns the result of exactly one completed call of its work, or raises an
error that names the work, the endpoint and the reason, after `max_attempts` calls at most. Other endpoints' requests
never wait for a dead one.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from megatron_mopd.errors import UserError
from megatron_mopd.protocols import EndpointDown

MAX_ATTEMPTS = 5
"""Servers that one request may bring down, or find dead, before it is given up; where nobody says otherwise."""
PROBE_INTERVAL_S = 0.5
_MAX_PAUSE_S = 30.0
_IMBALANCE = 16
"""A server is too busy for its own prefixes when it has this many requests more than the idlest."""

Result = TypeVar("Result")


@dataclass(eq=False)
class Server:
    """One server as the fleet sees it."""

    url: str
    up: bool = False
    in_flight: int = 0
    why_down: str = "it has not answered yet"
    failures: int = 0
    """In a row, without a completed request between them."""


@dataclass(eq=False)
class _Ticket:
    """A request that waits for its server."""

    key: str
    prefix: Sequence[int]
    server: asyncio.Future[Server] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass(frozen=True)
class Patience:
    """How long and how often the failures of a fleet are borne. The options are named in messages."""

    start_timeout_s: float
    start_option: str
    recovery_timeout_s: float
    recovery_option: str
    max_attempts: int = MAX_ATTEMPTS
    attempt_timeout_s: float | None = None
    """For one call of the work, whatever trickles in."""


class Fleet:
    """`name` says in messages what the servers are for. `prepare(url)` runs before a server gets (new) work, each time
    that it was down; it raises EndpointDown to try again later, UserError to end the run. `check_hope()` is called
    while a server is down; it raises UserError where none will come back."""

    def __init__(
        self,
        name: str,
        urls: Sequence[str],
        prepare: Callable[[str], Awaitable[None]],
        patience: Patience,
        *,
        max_requests: int,
        check_hope: Callable[[], None] = lambda: None,
    ):
        self.name = name
        self.servers = [Server(url) for url in dict.fromkeys(urls)]
        self._prepare, self._check_hope = prepare, check_hope
        self._patience, self._max_requests = patience, max_requests
        self._home: dict[str, Server] = {}
        self._waiting: deque[_Ticket] = deque()
        self._watches: dict[Server, asyncio.Task[None]] = {}
        self._deadline: asyncio.TimerHandle | None = None
        self._failure: BaseException | None = None

    @property
    def urls(self) -> list[str]:
        """The servers that take work now."""
        return [server.url for server in self.servers if server.up]

    async def start(self) -> None:
        """Return once every server answers and is prepared. Raises UserError naming one that is not."""
        for server in self.servers:
            self._watch(server)
        watches = list(self._watches.values())
        timeout_s = self._patience.start_timeout_s
        await asyncio.wait(watches, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        if self._failure is not None:
            raise self._failure
        for server in self.servers:
            if not server.up:
                raise UserError(
                    f"{self.name} server {server.url} is not ready after {timeout_s:g} s "
                    f"({self._patience.start_option}): {server.why_down}"
                )

    async def run(
        self, what: str, work: Callable[[str], Awaitable[Result]], *, key: str = "", prefix: Sequence[int] = ()
    ) -> Result:
        """Call `work(url)` on a server; where that one dies, call it again on the next.

        `what` names the work in errors. Requests of the same `key` stay on one server; a new key starts where its
        `prefix` of token ids belongs.
        """
        assert self._watches, "start() comes first"
        last: EndpointDown | None = None
        for _ in range(self._patience.max_attempts):
            server = await self._take(what, key, prefix)
            try:
                result = await self._attempt(server, work)
            except EndpointDown as error:
                self.mark_down(server.url, error.reason)
                last = error
            else:
                server.failures = 0
                return result
            finally:
                self._release(server)
        attempts = self._patience.max_attempts
        raise UserError(f"{what}: {self.name} servers died {attempts} times under it; last: {last}")

    async def _attempt(self, server: Server, work: Callable[[str], Awaitable[Result]]) -> Result:
        limit = asyncio.timeout(self._patience.attempt_timeout_s)
        try:
            async with limit:
                return await work(server.url)
        except TimeoutError:
            if not limit.expired():
                raise
            reason = f"no whole reply within {self._patience.attempt_timeout_s:g} s"
            raise EndpointDown(server.url, reason) from None

    def mark_down(self, url: str, reason: str) -> None:
        """Give the server no work until it answers again and is prepared anew."""
        server = next(s for s in self.servers if s.url == url)
        if not server.up:
            return
        server.up = False
        server.failures += 1
        self._note_down(server, reason)
        self._home = {key: home for key, home in self._home.items() if home is not server}
        self._watch(server)
        if not self.urls:
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(self._patience.recovery_timeout_s, self._give_up)

    def forget_prefixes(self) -> None:
        """After an update of the weights no server holds anything that is still of use."""
        self._home = {}

    async def close(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        for watch in self._watches.values():
            watch.cancel()
        await asyncio.gather(*self._watches.values(), return_exceptions=True)

    async def _take(self, what: str, key: str, prefix: Sequence[int]) -> Server:
        """A server with room, its place taken."""
        if self._failure is not None:
            raise UserError(f"{what}: {self._failure}") from self._failure
        ticket = _Ticket(key, prefix)
        self._waiting.append(ticket)
        self._hand_out()
        try:
            return await ticket.server
        except asyncio.CancelledError:
            if not ticket.server.cancelled():  # it was handed out in the same moment
                self._release(ticket.server.result())
            raise
        except UserError as error:
            raise UserError(f"{what}: {error}") from error

    def _release(self, server: Server) -> None:
        server.in_flight -= 1
        self._hand_out()

    def _hand_out(self) -> None:
        """Give free places to those who wait, in order of arrival."""
        while self._waiting:
            ticket = self._waiting[0]
            if not ticket.server.done():
                if (server := self._choose(ticket.key, ticket.prefix)) is None:
                    return
                server.in_flight += 1
                if ticket.key:
                    self._home[ticket.key] = server
                ticket.server.set_result(server)
            self._waiting.popleft()

    def _choose(self, key: str, prefix: Sequence[int]) -> Server | None:
        free = [s for s in self.servers if s.up and s.in_flight < self._max_requests]
        if not free:
            return None
        idlest = min(free, key=lambda s: s.in_flight)
        home = self._home.get(key) or _rendezvous(prefix, [s for s in self.servers if s.up])
        return home if home in free and home.in_flight - idlest.in_flight < _IMBALANCE else idlest

    def _watch(self, server: Server) -> None:
        watch = asyncio.create_task(self._until_up(server))
        watch.add_done_callback(self._watched)
        self._watches[server] = watch

    async def _until_up(self, server: Server) -> None:
        if server.failures > 1:  # it said that it was well, and was not
            await asyncio.sleep(_jittered(min(_MAX_PAUSE_S, PROBE_INTERVAL_S * 2.0 ** (server.failures - 2))))
        while not server.up:
            try:
                await self._prepare(server.url)
                server.up = True
            except EndpointDown as error:
                self._note_down(server, error.reason)
                self._check_hope()
                await asyncio.sleep(_jittered(PROBE_INTERVAL_S))
        print(f"{self.name} server {server.url} takes work", file=sys.stderr, flush=True)
        if self._deadline is not None:
            self._deadline.cancel()
        self._hand_out()

    def _note_down(self, server: Server, reason: str) -> None:
        """Say it once, in the driver's log: where others go on without it, nobody else would."""
        if reason != server.why_down:
            print(f"{self.name} server {server.url} gets no work: {reason}", file=sys.stderr, flush=True)
        server.why_down = reason

    def _watched(self, watch: asyncio.Task[None]) -> None:
        if not watch.cancelled() and (error := watch.exception()) is not None:
            self._fail(error)

    def _give_up(self) -> None:
        reasons = "; ".join(f"{s.url}: {s.why_down}" for s in self.servers)
        self._fail(
            UserError(
                f"no {self.name} server came back within {self._patience.recovery_timeout_s:g} s "
                f"({self._patience.recovery_option}); {reasons}"
            )
        )

    def _fail(self, failure: BaseException) -> None:
        """Nobody waits any longer, now or later."""
        self._failure = failure
        for ticket in self._waiting:
            if not ticket.server.done():
                ticket.server.set_exception(failure)
        self._waiting.clear()


def _jittered(seconds: float) -> float:
    """So that many who wait for one server do not ask it in the same moment."""
    return seconds * random.uniform(0.5, 1.5)


def _rendezvous(prefix: Sequence[int], servers: Sequence[Server]) -> Server:
    """The server that these token ids hash to; only a dead server's prefixes move when it dies."""
    if len(servers) == 1:
        return servers[0]
    tokens = hashlib.blake2b(np.asarray(prefix, np.int64).tobytes()).digest()
    return max(servers, key=lambda s: hashlib.blake2b(tokens + s.url.encode(), digest_size=8).digest())
