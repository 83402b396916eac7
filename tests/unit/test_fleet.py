"""The client and the fleet against real HTTP servers on the loopback, without SGLang."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from megatron_mopd import fleet as fleet_module
from megatron_mopd.client import Client, RequestRefused
from megatron_mopd.errors import UserError
from megatron_mopd.fleet import MAX_ATTEMPTS, Fleet, Patience
from megatron_mopd.protocols import EndpointDown


class Backend:
    """Answers /server_info, and /work after `gate` is open; `stop` and `serve` are its death and return."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.dead = asyncio.Event()
        self.port, self.in_flight, self.most, self.num_works = 0, 0, 0, 0
        self.events: list[bytes] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self) -> None:
        self.dead.clear()
        app = web.Application()
        app.add_routes(
            [
                web.get("/server_info", self._info),
                web.post("/work", self._work),
                web.post("/stream", self._stream),
                web.post("/refuse", self._refuse),
                web.post("/broken", self._broken),
                web.get("/junk", self._junk),
                web.get("/binary", self._binary),
            ]
        )
        self._runner = web.AppRunner(app, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        self.dead.set()
        await self._runner.cleanup()

    async def _info(self, _: web.Request) -> web.Response:
        return web.json_response({})

    async def _work(self, request: web.Request) -> web.Response:
        self.in_flight += 1
        self.num_works += 1
        self.most = max(self.most, self.in_flight)
        try:
            waits = [asyncio.ensure_future(event.wait()) for event in (self.gate, self.dead)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            if self.dead.is_set() and request.transport is not None:
                request.transport.abort()
            return web.json_response({"port": self.port, "body": await request.json()})
        finally:
            self.in_flight -= 1

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for event in self.events:
            await response.write(event)
            await asyncio.sleep(0)
        return response

    async def _refuse(self, _: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no\nsuch thing"}}, status=400)

    async def _broken(self, _: web.Request) -> web.Response:
        return web.Response(text="oops", status=500)

    async def _junk(self, _: web.Request) -> web.Response:
        return web.Response(text="{no json")

    async def _binary(self, _: web.Request) -> web.Response:
        return web.Response(body=b"\xff\xfe", status=400, content_type="text/plain", charset="utf-8")


async def no_preparation(url: str) -> None: ...


@asynccontextmanager
async def world(
    num_servers: int, prepare: Callable[[str], Awaitable[None]] = no_preparation, **options: Any
) -> AsyncIterator[tuple[Fleet, list[Backend], Client]]:
    backends = [Backend() for _ in range(num_servers)]
    for backend in backends:
        await backend.serve()
    client = Client(silence_s=5.0)
    limits = {"start_timeout_s": 5.0, "recovery_timeout_s": 5.0, **options}
    own = {key: limits.pop(key) for key in ("max_requests", "check_hope") if key in limits}

    async def probe(url: str) -> None:
        await client.get(url, "/server_info")
        await prepare(url)

    patience = Patience(start_option="x.start", recovery_option="x.recovery", **limits)
    fleet = Fleet("student", [b.url for b in backends], probe, patience, **{"max_requests": 4, **own})
    try:
        yield fleet, backends, client
    finally:
        await fleet.close()
        await client.close()
        for backend in backends:
            await backend.stop()


def work(client: Client, body: Any = None) -> Callable[[str], Awaitable[int]]:
    async def post(url: str) -> int:
        return (await client.post(url, "/work", body or {}))["port"]

    return post


@pytest.fixture(autouse=True)
def quick_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "PROBE_INTERVAL_S", 0.02)


def test_no_server_gets_more_than_it_may_have_and_everyone_is_served() -> None:
    async def body() -> None:
        async with world(2) as (fleet, backends, client):
            await fleet.start()
            for backend in backends:
                backend.gate.clear()
            asked = [asyncio.create_task(fleet.run(f"{i}", work(client), prefix=(i,))) for i in range(300)]
            while sum(b.in_flight for b in backends) < 8:
                await asyncio.sleep(0.01)
            for backend in backends:
                backend.gate.set()
            await asyncio.gather(*asked)
            assert [b.most for b in backends] == [4, 4]
            assert sum(b.num_works for b in backends) == 300

    asyncio.run(body())


def test_places_are_given_in_order_of_arrival() -> None:
    async def body() -> None:
        async with world(1, max_requests=1) as (fleet, _, client):
            await fleet.start()
            order: list[int] = []

            async def one(i: int) -> None:
                await fleet.run(f"{i}", work(client))
                order.append(i)

            await asyncio.gather(*[one(i) for i in range(20)])
            assert order == list(range(20))

    asyncio.run(body())


def test_a_prefix_has_a_home_and_a_key_stays_there() -> None:
    async def body() -> None:
        async with world(3) as (fleet, _, client):
            await fleet.start()
            homes = [{await fleet.run("w", work(client), prefix=(p, p)) for _ in range(3)} for p in range(30)]
            assert all(len(home) == 1 for home in homes)
            assert len(set.union(*homes)) == 3
            first = await fleet.run("w", work(client), key="t", prefix=(0, 0))
            assert {await fleet.run("w", work(client), key="t", prefix=(p,)) for p in range(20)} == {first}

    asyncio.run(body())


def test_a_busy_home_sends_its_work_elsewhere() -> None:
    async def body() -> None:
        async with world(2, max_requests=100) as (fleet, backends, client):
            await fleet.start()
            for backend in backends:
                backend.gate.clear()
            asked = [asyncio.create_task(fleet.run(f"{i}", work(client), prefix=(7,))) for i in range(40)]
            while sum(b.in_flight for b in backends) < 40:
                await asyncio.sleep(0.01)
            assert min(b.in_flight for b in backends) == 12  # 16 more at home than elsewhere, then in turn
            for backend in backends:
                backend.gate.set()
            await asyncio.gather(*asked)

    asyncio.run(body())


def test_work_of_a_dead_server_is_done_elsewhere_and_it_gets_work_again(capsys: pytest.CaptureFixture[str]) -> None:
    async def body() -> None:
        prepared: Counter[str] = Counter()

        async def prepare(url: str) -> None:
            prepared[url] += 1

        async with world(2, prepare, max_requests=100) as (fleet, backends, client):
            await fleet.start()
            for backend in backends:
                backend.gate.clear()
            asked = [asyncio.create_task(fleet.run(f"{i}", work(client), prefix=(i,))) for i in range(50)]
            while sum(b.in_flight for b in backends) < 50:
                await asyncio.sleep(0.01)
            dead, alive = backends
            await dead.stop()
            alive.gate.set()
            assert set(await asyncio.gather(*asked)) == {alive.port}
            assert fleet.urls == [alive.url]
            dead.gate.set()
            await dead.serve()
            while len(fleet.urls) < 2:
                await asyncio.sleep(0.01)
            assert prepared == {dead.url: 2, alive.url: 1}
            ports = await asyncio.gather(*[fleet.run(f"{i}", work(client), prefix=(i,)) for i in range(50)])
            assert set(ports) == {dead.port, alive.port}

    asyncio.run(body())
    log = capsys.readouterr().err.splitlines()
    assert sum("gets no work: " in line for line in log) >= 1
    assert sum("takes work" in line for line in log) == 3, "two at first, one again"


def test_work_waits_for_a_lone_server_and_for_no_longer_than_it_may() -> None:
    async def body() -> None:
        async with world(1, recovery_timeout_s=1.0) as (fleet, (backend,), client):
            await fleet.start()
            await backend.stop()
            asked = asyncio.create_task(fleet.run("t-1", work(client)))
            await asyncio.sleep(0.3)
            await backend.serve()
            assert await asked == backend.port
            await backend.stop()
            with pytest.raises(
                UserError, match=rf"^t-1: no student server came back within 1 s .*{backend.url}: .*cannot connect"
            ):
                await fleet.run("t-1", work(client))
            with pytest.raises(UserError, match=r"^t-2: no student server came back"):
                await fleet.run("t-2", work(client))
            await backend.serve()

    asyncio.run(body())


def test_work_that_kills_every_server_is_given_up() -> None:
    async def body() -> None:
        async with world(2) as (fleet, _, client):
            await fleet.start()

            async def deadly(url: str) -> None:
                await client.post(url, "/broken", {})

            with pytest.raises(UserError, match=f"^t-1: student servers died {MAX_ATTEMPTS} times .*answered 500 oops"):
                await fleet.run("t-1", deadly)

    asyncio.run(body())


def test_what_trickles_in_has_a_time_limit_and_is_done_elsewhere() -> None:
    async def body() -> None:
        async with world(2, attempt_timeout_s=0.2) as (fleet, backends, client):
            await fleet.start()
            slow, quick = backends
            slow.gate.clear()
            ports = await asyncio.gather(*[fleet.run(f"{i}", work(client), prefix=(i,)) for i in range(20)])
            assert set(ports) == {quick.port}
            assert fleet.servers[0].failures
            slow.gate.set()

    asyncio.run(body())


def test_a_server_that_says_it_is_well_and_is_not_is_left_alone_for_longer_each_time() -> None:
    async def body() -> None:
        async with world(1, max_attempts=6) as (fleet, (backend,), client):
            await fleet.start()
            times: list[float] = []

            async def failing(url: str) -> None:
                times.append(asyncio.get_running_loop().time())
                await client.post(url, "/broken", {})

            with pytest.raises(UserError, match="died 6 times"):
                await fleet.run("t-1", failing)
            pauses = [after - before for before, after in itertools.pairwise(times)]
            assert pauses[-1] > 0.5 * 16 / 2 * fleet_module.PROBE_INTERVAL_S
            assert pauses[-1] > 4 * pauses[0]
            while not fleet.urls:
                await asyncio.sleep(0.01)
            assert await fleet.run("t-2", work(client)) == backend.port
            assert fleet.servers[0].failures == 0

    asyncio.run(body())


def test_a_caller_who_leaves_gives_its_place_back() -> None:
    async def body() -> None:
        async with world(1, max_requests=1) as (fleet, (backend,), client):
            await fleet.start()
            backend.gate.clear()
            asked = [asyncio.create_task(fleet.run(f"{i}", work(client))) for i in range(5)]
            while not backend.in_flight:
                await asyncio.sleep(0.01)
            for leaver in (asked[0], asked[2]):
                leaver.cancel()
            backend.gate.set()
            done = await asyncio.gather(*asked, return_exceptions=True)
            assert [isinstance(d, asyncio.CancelledError) for d in done] == [True, False, True, False, False]

    asyncio.run(body())


def test_a_server_that_is_refused_ends_the_start_at_once() -> None:
    async def prepare(url: str) -> None:
        raise UserError(f"server {url} is of another model")

    async def body() -> None:
        async with world(2, prepare) as (fleet, _, client):
            with pytest.raises(UserError, match="is of another model"):
                await fleet.start()
            with pytest.raises(UserError, match=r"^t-1: server .* is of another model"):
                await fleet.run("t-1", work(client))

    asyncio.run(body())


def test_a_server_that_is_not_there_is_named() -> None:
    async def body() -> None:
        async with world(1, start_timeout_s=0.2) as (fleet, (backend,), _):
            await backend.stop()
            with pytest.raises(
                UserError, match=rf"^student server {backend.url} is not ready after 0.2 s .*cannot connect"
            ):
                await fleet.start()
            await backend.serve()

    asyncio.run(body())


def test_nobody_waits_for_servers_that_will_not_come_back() -> None:
    def check_hope() -> None:
        raise UserError("the keeper gave up")

    async def body() -> None:
        async with world(1, check_hope=check_hope) as (fleet, (backend,), client):
            await fleet.start()
            await backend.stop()
            with pytest.raises(UserError, match=r"^t-1: the keeper gave up"):
                await fleet.run("t-1", work(client))
            await backend.serve()

    asyncio.run(body())


def test_each_failure_of_a_request_is_one_line() -> None:
    async def body() -> None:
        async with world(1) as (_, (backend,), client):
            with pytest.raises(RequestRefused, match=f"^{backend.url}/refuse answered 400: no such thing$"):
                await client.post(backend.url, "/refuse", {})
            with pytest.raises(RequestRefused, match=f"^{backend.url} has no /nowhere;"):
                await client.get(backend.url, "/nowhere")
            with pytest.raises(EndpointDown, match="answered 500 oops"):
                await client.post(backend.url, "/broken", {})
            with pytest.raises(RequestRefused, match="/junk answered what is no JSON; check the URL"):
                await client.get(backend.url, "/junk")
            with pytest.raises(RequestRefused, match="/binary answered 400"):
                await client.get(backend.url, "/binary")
            with pytest.raises(UserError, match="is not a URL such as"):
                await client.get("nonsense", "/server_info")
            backend.gate.clear()
            with pytest.raises(EndpointDown, match=r"no answer for 0.2 s"):
                await client.post(backend.url, "/work", {}, silence_s=0.2)
            backend.gate.set()

    asyncio.run(body())


def test_token_ids_of_an_environment_may_be_numpy_integers() -> None:
    async def body() -> None:
        async with world(1) as (_, (backend,), client):
            ids = (1, np.int64(2), np.int32(3))
            assert (await client.post(backend.url, "/work", {"input_ids": ids}))["body"] == {"input_ids": [1, 2, 3]}

    asyncio.run(body())


async def streamed(client: Client, url: str) -> list[Any]:
    return [event async for event in client.stream(url, "/stream", {})]


def test_a_streamed_message_may_be_of_any_size_and_cut_anywhere() -> None:
    async def body() -> None:
        async with world(1) as (_, (backend,), client):
            long = "x" * (9 << 20)
            text = f'data: {{"a": 1}}\n\ndata: {{"b": "{long}"}}\n\ndata: [DONE]\n\n'.encode()
            for step in (7, 1 << 16, len(text)):
                if step == 7:
                    backend.events = [text[i : i + 7] for i in range(0, 70, 7)] + [text[70:]]
                else:
                    backend.events = [text[i : i + step] for i in range(0, len(text), step)]
                assert await streamed(client, backend.url) == [{"a": 1}, {"b": long}]

    asyncio.run(body())


def test_a_stream_that_ends_early_or_in_an_error_is_not_taken_for_whole() -> None:
    async def body() -> None:
        async with world(1) as (_, (backend,), client):
            backend.events = [b'data: {"a": 1}\n\n']
            with pytest.raises(EndpointDown, match="the stream ended early"):
                await streamed(client, backend.url)
            backend.events = [b'data: {"error": {"message": "too long", "code": 400}}\n\n', b"data: [DONE]\n\n"]
            with pytest.raises(RequestRefused, match="/stream: too long"):
                await streamed(client, backend.url)

    asyncio.run(body())
