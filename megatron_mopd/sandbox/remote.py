"""Workspaces of a service, microVMs for one, over HTTP: the contract is in docs/sandboxes.md.

Promises (tests/contract/test_workspace.py, tests/unit/test_remote_workspaces.py): the same laws as on this machine; a
service that is away for a while is asked again, with the same key, so that no command runs twice; one that stays away
is a WorkspaceFailed after a bounded number of tries.
"""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from megatron_mopd.client import Client, EndpointBusy
from megatron_mopd.errors import UserError
from megatron_mopd.protocols import EndpointDown, Execution, WorkspaceFailed
from megatron_mopd.sandbox.words import encoded
from megatron_mopd.servers.addresses import check_url, is_loopback, read_api_key

PAUSES_S = (0.2, 1.0, 3.0, 10.0)
"""Before the second try, the third, and so on; the last one before all others."""
MOST_PAUSE_S = 30.0
ENDS = ("timeout", "killed", "refused")


class RemoteWorkspaces:
    def __init__(
        self,
        *,
        url: str = "http://127.0.0.1:8480",
        api_key_env: str | None = None,
        timeout_s: float = 60.0,
        silence_s: float = 60.0,
        tries: int = 5,
    ) -> None:
        """Args:
        api_key_env: the variable that holds the service's bearer token.
        timeout_s: wall clock of a command.
        silence_s: how long the service may take to answer, beyond a command's time.
        tries: of each call.
        """
        check_url(url, "workspaces.url")
        if not is_loopback(urlsplit(url).hostname or "") and api_key_env is None:
            raise UserError(f"workspaces: {url} is on another machine; set api_key_env to the variable with its token")
        if not all(isinstance(value, int | float) and value > 0 for value in (timeout_s, silence_s, tries)):
            raise UserError("workspaces: timeout_s, silence_s and tries must be above 0")
        self.url, self.timeout_s, self._silence_s, self._tries = url, timeout_s, silence_s, int(tries)
        self._client = Client(silence_s, read_api_key("workspaces", api_key_env))
        self._workspaces: set[RemoteWorkspace] = set()

    async def create(self) -> RemoteWorkspace:
        return self._made(await self.post("/workspaces", {}))

    async def close(self) -> None:
        try:
            for workspace in tuple(self._workspaces):
                await workspace.close()
        finally:
            await self._client.close()

    def _made(self, reply: dict[str, Any]) -> RemoteWorkspace:
        workspace = RemoteWorkspace(self, _text(reply, "id"))
        self._workspaces.add(workspace)
        return workspace

    def forget(self, workspace: RemoteWorkspace) -> None:
        self._workspaces.discard(workspace)

    async def post(self, path: str, body: dict[str, Any], runs_s: float = 0.0) -> dict[str, Any]:
        body = {**body, "key": uuid.uuid4().hex}
        return await self._tried(path, lambda: self._client.post(self.url, path, body, self._silence_s + runs_s))

    async def delete(self, path: str) -> None:
        await self._tried(path, lambda: self._client.delete(self.url, path))

    async def _tried(self, path: str, ask: Callable[[], Awaitable[Any]]) -> dict[str, Any]:
        for number in range(self._tries):
            try:
                reply = await ask()
                break
            except EndpointDown as error:
                if number + 1 == self._tries:
                    raise WorkspaceFailed(f"{path} failed {self._tries} times: {error}") from error
                pause_s = PAUSES_S[min(number, len(PAUSES_S) - 1)]
                wanted_s = error.retry_after_s if isinstance(error, EndpointBusy) else 0.0
                await asyncio.sleep(min(max(pause_s, wanted_s), MOST_PAUSE_S))
        if not isinstance(reply, dict):
            raise WorkspaceFailed(f"{self.url}{path} answered {str(reply)[:80]!r}, which the contract does not know")
        if "failed" in reply:
            raise WorkspaceFailed(str(reply["failed"])[:1000])
        return reply


class RemoteWorkspace:
    def __init__(self, factory: RemoteWorkspaces, identifier: str) -> None:
        self._factory, self._path = factory, f"/workspaces/{identifier}"
        self._lock = asyncio.Lock()
        self._closed = False

    async def run(self, command: Sequence[str], stdin: bytes = b"", timeout_s: float | None = None) -> Execution:
        try:
            encoded(command)
        except ValueError as error:
            return Execution("", f"workspace: {error}", "refused")
        limit_s = self._factory.timeout_s
        limit_s = limit_s if timeout_s is None else min(timeout_s, limit_s)
        body = {"command": list(command), "stdin": base64.b64encode(stdin).decode(), "timeout_s": limit_s}
        reply = await self._post("/run", body, limit_s)
        ended = reply.get("ended")
        if ended not in ENDS and (not isinstance(ended, int) or isinstance(ended, bool)):
            raise WorkspaceFailed(f"{self._path}/run ended with {ended!r}, which the contract does not know")
        return Execution(_text(reply, "stdout"), _text(reply, "stderr"), ended)

    async def snapshot(self) -> str:
        return _text(await self._post("/snapshot", {}), "name")

    async def restore(self, name: str) -> None:
        await self._post("/restore", {"name": name})

    async def fork(self) -> RemoteWorkspace:
        return self._factory._made(await self._post("/fork", {}))

    async def close(self) -> None:
        async with self._lock:
            if not self._closed:
                self._closed = True
                self._factory.forget(self)
                await self._factory.delete(self._path)

    async def _post(self, path: str, body: dict[str, Any], runs_s: float = 0.0) -> dict[str, Any]:
        async with self._lock:
            if self._closed:
                raise WorkspaceFailed("it was closed")
            return await self._factory.post(self._path + path, body, runs_s)


def _text(reply: dict[str, Any], name: str) -> str:
    if not isinstance(text := reply.get(name), str):
        raise WorkspaceFailed(f"the service answered without a text {name!r}: {str(reply)[:200]}")
    return text
