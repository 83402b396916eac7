"""The front of the teacher service: an HTTP server in a thread of rank 0's process, and the end in order.

    front = Front(config, served)
    front.start()                        # from the main thread; it answers, and takes work from the first take() on
    while not front.drained:
        if work := front.take(timeout_s):
            work.done(scores of work.teacher for work.rows)
    front.close()

SIGTERM and SIGINT ask it to end: no new work (503), what is queued is finished, then `drained`. They are heard by the
server's thread, at once, whatever the main thread computes.

Promises (tests/unit/test_service_front.py): what was accepted is answered before `close` returns; no host but this
machine is served without a key. Torch-free.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress

from aiohttp import web

from megatron_mopd.config import Config
from megatron_mopd.errors import UserError
from megatron_mopd.servers.addresses import check_host, url_of
from megatron_mopd.service.api import Api
from megatron_mopd.service.arguments import api_key
from megatron_mopd.service.checks import Served
from megatron_mopd.service.work import ScoreWork, WorkQueue

__all__ = ["Front", "ScoreWork", "Served"]

SIGNALS = (signal.SIGTERM, signal.SIGINT)
BYTES_PER_TOKEN = 8
"""In JSON a token id may take so many; no request may be larger than a full queue."""
LAST_REPLIES_S = 10.0
"""For the last replies to be read."""


class Front:
    """Raises UserError for a host, key or port that cannot be."""

    def __init__(self, config: Config, served: Mapping[str, Served]):
        table, key = config.service, api_key(config)
        check_host("service", table.host, has_key=key is not None)
        self._host, self._port = table.host, table.port
        self._queue = WorkQueue(table.batch_tokens, table.max_waiting_tokens)
        max_body_bytes = BYTES_PER_TOKEN * table.max_waiting_tokens + (1 << 20)
        self._api = Api(served, config.rollout.temperature, self._queue, self._state, key, max_body_bytes)
        self._taking = self._draining = False
        self._url: Future[str] = Future()
        self._closed: Future[asyncio.Event] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="front", daemon=True)

    def start(self) -> str:
        """Return the URL once the server answers. It hears the signals from here on."""
        self._signalled, self._signals = socket.socketpair()
        self._signalled.setblocking(False)
        self._signals.setblocking(False)
        self._before = {number: signal.signal(number, _by_wakeup) for number in SIGNALS}
        self._wakeup_before = signal.set_wakeup_fd(self._signals.fileno(), warn_on_full_buffer=False)
        self._thread.start()
        try:
            return self._url.result()
        except UserError:
            self._ignore_signals()
            raise

    def take(self, timeout_s: float) -> ScoreWork | None:
        """The next batch of work; None if nothing came in that time. The first call opens the service."""
        self._taking = True
        return self._queue.take(timeout_s)

    def drain(self) -> None:
        """What the signals do."""
        before, self._draining = self._draining, True
        if not before:
            with suppress(OSError):  # its reader may be gone
                print("teacher service: asked to end; finishing what is queued", file=sys.stderr, flush=True)

    @property
    def drained(self) -> bool:
        """Asked to end, and nothing is left to compute."""
        return self._draining and self._queue.idle

    def close(self) -> None:
        """Send the last replies and stop listening."""
        closed = self._closed.result()
        self._loop.call_soon_threadsafe(closed.set)
        self._thread.join()
        self._ignore_signals()

    def _ignore_signals(self) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._signalled.close()
        self._signals.close()

    def _state(self) -> str | None:
        if self._draining:
            return "this service is ending; ask another one, or this one again later"
        return None if self._taking else "this service is starting; ask again later"

    async def _serve(self) -> None:
        self._loop, closed = asyncio.get_running_loop(), asyncio.Event()
        runner = web.AppRunner(
            self._api.app, access_log=None, handler_cancellation=True, shutdown_timeout=LAST_REPLIES_S
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port, reuse_address=True).start()
        except OSError as error:
            return self._url.set_exception(
                UserError(f"service.port={self._port}: {error.strerror}; set another, or 0 for a free one")
            )
        self._loop.add_reader(self._signalled, self._on_signal)
        self._closed.set_result(closed)
        self._url.set_result(url_of(self._host, runner.addresses[0][1]))
        await closed.wait()
        self._loop.remove_reader(self._signalled)
        await runner.cleanup()

    def _on_signal(self) -> None:
        if set(self._signalled.recv(64)) & set(SIGNALS):
            self.drain()


def _by_wakeup(*_: object) -> None:
    """The signal's number has been written to the socket already."""
