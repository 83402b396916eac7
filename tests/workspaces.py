"""Both backends of workspaces, for tests: bubblewrap, and a service that a test starts with bubblewrap behind it.

    python workspaces.py BACKEND FOLDER SNAPSHOT COMMAND...

restores a snapshot in a process of its own and prints how a command ends there.
"""

from __future__ import annotations

import asyncio
import base64
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from megatron_mopd.protocols import Workspace, WorkspaceFactory, WorkspaceFailed
from megatron_mopd.sandbox.bubblewrap import BubblewrapWorkspaces
from megatron_mopd.sandbox.remote import RemoteWorkspaces

PYTHON = str(Path(sys.executable).resolve())
READ_ONLY = () if PYTHON.startswith("/usr/") else (sys.base_prefix,)
TOKEN = "a token"
Call = Callable[[Workspace, dict[str, Any]], Awaitable[dict[str, Any]]]


def local(folder: Path, **options: Any) -> BubblewrapWorkspaces:
    return BubblewrapWorkspaces(folder, **{"read_only": READ_ONLY, "timeout_s": 120, "max_running": 4, **options})


@asynccontextmanager
async def opened(backend: str, folder: Path, **options: Any) -> AsyncIterator[WorkspaceFactory]:
    factory = local(folder, **options)
    try:
        if backend == "bubblewrap":
            yield factory
        else:
            async with Service(factory).serving() as url:
                remote = RemoteWorkspaces(url=url)
                try:
                    yield remote
                finally:
                    await remote.close()
    finally:
        await factory.close()


class Service:
    """The contract of docs/sandboxes.md over any factory. `break_next`: what to do to the next calls, in turn: a status
    to answer instead, or "lose": do it, and hang up."""

    def __init__(self, factory: WorkspaceFactory, token: str | None = None) -> None:
        self._factory, self._token = factory, token
        self._workspaces: dict[str, Workspace] = {}
        self._replies: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self.break_next: list[int | str] = []
        self.num_runs = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/workspaces", self._create)
        calls: dict[str, Call] = {"run": self._run, "snapshot": _snapshot, "restore": _restore, "fork": self._fork}
        for name, call in calls.items():
            app.router.add_post("/workspaces/{id}/" + name, self._handler(call))
        app.router.add_delete("/workspaces/{id}", self._delete)
        runner = web.AppRunner(app, handler_cancellation=False)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    def _handler(self, call: Call) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            workspace = self._workspaces.get(request.match_info["id"])

            async def answer(body: dict[str, Any]) -> dict[str, Any]:
                if workspace is None:
                    return {"failed": "there is no such workspace"}
                return await call(workspace, body)

            return await self._answered(request, answer)

        return handle

    async def _answered(
        self, request: web.Request, answer: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
    ) -> web.StreamResponse:
        if self._token and request.headers.get("Authorization") != f"Bearer {self._token}":
            raise web.HTTPUnauthorized
        broken = self.break_next.pop(0) if self.break_next else None
        if isinstance(broken, int):
            return web.Response(status=broken, text="busy", headers={"Retry-After": "0"})
        body = await request.json()
        if body["key"] not in self._replies:
            self._replies[body["key"]] = asyncio.ensure_future(_caught(answer(body)))
        reply = await asyncio.shield(self._replies[body["key"]])
        if broken == "lose" and request.transport is not None:
            request.transport.close()
        return web.json_response(reply)

    async def _create(self, request: web.Request) -> web.StreamResponse:
        async def answer(_: dict[str, Any]) -> dict[str, Any]:
            return self._named(await self._factory.create())

        return await self._answered(request, answer)

    def _named(self, workspace: Workspace) -> dict[str, Any]:
        name = f"w{len(self._workspaces)}"
        self._workspaces[name] = workspace
        return {"id": name}

    async def _run(self, workspace: Workspace, body: dict[str, Any]) -> dict[str, Any]:
        self.num_runs += 1
        done = await workspace.run(body["command"], base64.b64decode(body["stdin"]), body["timeout_s"])
        return {"stdout": done.stdout, "stderr": done.stderr, "ended": done.ended}

    async def _fork(self, workspace: Workspace, _: dict[str, Any]) -> dict[str, Any]:
        return self._named(await workspace.fork())

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        workspace = self._workspaces.pop(request.match_info["id"], None)
        if workspace is not None:
            await workspace.close()
        return web.json_response({})


async def _snapshot(workspace: Workspace, _: dict[str, Any]) -> dict[str, Any]:
    return {"name": await workspace.snapshot()}


async def _restore(workspace: Workspace, body: dict[str, Any]) -> dict[str, Any]:
    await workspace.restore(body["name"])
    return {}


async def _caught(answer: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    try:
        return await answer
    except WorkspaceFailed as error:
        return {"failed": str(error)}


async def main(backend: str, folder: str, snapshot: str, *command: str) -> None:
    async with opened(backend, Path(folder)) as factory:
        workspace = await factory.create()
        await workspace.restore(snapshot)
        done = await workspace.run(command)
        assert await workspace.snapshot()
        print(done.stdout, end="")
        sys.exit(done.ended)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
