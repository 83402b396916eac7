"""A proxy that breaks what passes through it: between a run and its teacher service, to see the run survive.

    python -m tools.faulty_proxy URL --port 8900 [--faults error,nan,...] [--share 0.1] [--teacher NAME] [--seed 0]
    mopd train CONFIG ... service.urls='[http://127.0.0.1:8900]'

Every POST /score has a fault with the given probability, one of the named ones, drawn from the seed. Everything else
passes as it is, headers included.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from megatron_mopd.service.body import ScoreReply, decode_call, decode_reply, encode_reply

Reply = tuple[int, bytes]
HOP_BY_HOP = {"connection", "content-length", "host", "transfer-encoding"}
DRIP_S = 0.2
PARTNER_S = 5.0
"""How long a reply waits for another one to change places with."""


class FaultyProxy:
    """`choose(teacher)` gives the fault of the next request for this teacher, or None. `seen` counts faults."""

    def __init__(self, target: str, choose: Callable[[str], str | None]):
        self.target, self.choose, self.seen = target, choose, Counter[str]()
        self._alone: list[tuple[Reply, asyncio.Future[Reply]]] = []
        """Replies that wait for a partner."""

    @asynccontextmanager
    async def serve(self, port: int = 0) -> AsyncIterator[str]:
        """The URL, as long as the context lasts."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._pass)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0)
        async with aiohttp.ClientSession(auto_decompress=False) as self._session:
            await runner.setup()
            try:
                await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
                yield f"http://127.0.0.1:{runner.addresses[0][1]}"
            finally:
                await runner.cleanup()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        is_score = request.method == "POST" and request.path == "/score"
        fault = self.choose(decode_call(body).teacher) if is_score else None
        if fault is None:
            return _response(await self._forward(request, body))
        self.seen[fault] += 1
        return await FAULTS[fault](self, request, body)

    async def _forward(self, request: web.Request, body: bytes) -> Reply:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        url = self.target + request.path_qs
        try:
            async with self._session.request(request.method, url, data=body, headers=headers) as reply:
                return reply.status, await reply.read()
        except aiohttp.ClientError:
            return 502, b""

    async def _hang(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """It accepts, and never answers."""
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def _error(self, request: web.Request, body: bytes) -> web.StreamResponse:
        return web.Response(status=500, text="out of memory")

    async def _drip(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """The right reply, a byte at a time: never silent, never done."""
        _, content = await self._forward(request, body)
        response = web.StreamResponse()
        response.content_length = len(content)
        await response.prepare(request)
        for byte in content:
            await response.write(bytes([byte]))
            await asyncio.sleep(DRIP_S)
        return response

    async def _duplicate(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """The request arrives twice."""
        first, _ = await asyncio.gather(self._forward(request, body), self._forward(request, body))
        return _response(first)

    async def _reorder(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """Two requests get each other's replies; one that finds no partner gets none."""
        own, theirs = await self._forward(request, body), asyncio.get_running_loop().create_future()
        if self._alone:
            reply, partner = self._alone.pop()
            partner.set_result(own)
            return _response(reply)
        self._alone.append((own, theirs))
        try:
            return _response(await asyncio.wait_for(theirs, PARTNER_S))
        except TimeoutError:
            return web.Response(status=504)
        finally:
            self._alone = [pair for pair in self._alone if pair[1] is not theirs]

    async def _truncate(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """Half of the reply, as if it were whole."""
        status, content = await self._forward(request, body)
        return _response((status, content[: len(content) // 2]))

    async def _hang_up(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """Half of the reply, then the connection is gone."""
        _, content = await self._forward(request, body)
        response = web.StreamResponse()
        response.content_length = len(content)
        await response.prepare(request)
        await response.write(content[: len(content) // 2])
        assert request.transport is not None
        request.transport.abort()
        return response

    async def _short(self, request: web.Request, body: bytes) -> web.StreamResponse:
        return await self._changed(request, body, lambda logprobs: logprobs[:-1])

    async def _nan(self, request: web.Request, body: bytes) -> web.StreamResponse:
        return await self._changed(request, body, lambda logprobs: np.append(logprobs[:-1], np.float32(np.nan)))

    async def _changed(
        self, request: web.Request, body: bytes, change: Callable[[np.ndarray], np.ndarray]
    ) -> web.StreamResponse:
        status, content = await self._forward(request, body)
        if status != 200:
            return _response((status, content))
        reply: ScoreReply = decode_reply(content)
        return _response((200, encode_reply(dataclasses.replace(reply, logprobs=change(reply.logprobs)))))


def _response(reply: Reply) -> web.Response:
    return web.Response(status=reply[0], body=reply[1])


FAULTS: dict[str, Callable[[FaultyProxy, web.Request, bytes], Coroutine[Any, Any, web.StreamResponse]]] = {
    "hang": FaultyProxy._hang,
    "error": FaultyProxy._error,
    "drip": FaultyProxy._drip,
    "duplicate": FaultyProxy._duplicate,
    "reorder": FaultyProxy._reorder,
    "truncate": FaultyProxy._truncate,
    "hang_up": FaultyProxy._hang_up,
    "short": FaultyProxy._short,
    "nan": FaultyProxy._nan,
}


async def run(target: str, port: int, faults: list[str], share: float, only: str | None, seed: int) -> None:
    draw = random.Random(seed)

    def choose(teacher: str) -> str | None:
        hit = draw.random() < share
        fault = draw.choice(faults)
        return fault if hit and only in (None, teacher) else None

    proxy, over = FaultyProxy(target, choose), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    async with proxy.serve(port) as url:
        print(f"{target} is at {url}, with faults: {', '.join(faults)}", flush=True)
        await over.wait()
    print(f"faults: {dict(proxy.seen)}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", metavar="URL")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--faults", type=lambda text: text.split(","), default=list(FAULTS))
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--teacher")
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    if unknown := set(a.faults) - FAULTS.keys():
        sys.exit(f"unknown fault {sorted(unknown)[0]}; known: {', '.join(FAULTS)}")
    asyncio.run(run(a.target, a.port, a.faults, a.share, a.teacher, a.seed))
