"""One HTTP client for every request to servers of any kind: aiohttp with orjson.

Three things can go wrong, and each is one type: the server cannot be reached, falls silent or breaks (`EndpointDown`;
the caller decides where the request goes next; `EndpointBusy` where the server says when it wants to be asked again),
it refuses what was asked (`RequestRefused`, with its own words), or it answers in a shape that this project does not
know (`RequestRefused` too). Nothing is retried here.

Promise (tests/unit/test_fleet.py): a streamed message may be of any size and cut anywhere.
"""

from __future__ import annotations

import io
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any

import aiohttp
import orjson

from megatron_mopd.errors import UserError
from megatron_mopd.protocols import EndpointDown

_BROKEN, _BUSY = (500, 502, 503, 504), (429, 503)
_READ_BYTES = 1 << 20
"""What is read ahead of a stream's consumer."""
_KEEP_ALIVE_S = 2.0
"""Below the servers' 5 s, so that no request is sent into a connection that its server is about to close."""


class RequestRefused(UserError):
    """The server answered that it will not do this."""


class EndpointBusy(EndpointDown):
    """It answered 429 or 503 with Retry-After."""

    def __init__(self, url: str, reason: str, retry_after_s: float):
        super().__init__(url, reason)
        self.retry_after_s = retry_after_s


class Client:
    """Use as `async with Client(...) as client`. `silence_s`: a server that sends nothing for so long is down."""

    def __init__(self, silence_s: float, api_key: str | None = None):
        self._silence_s = silence_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(self, url: str, path: str, silence_s: float | None = None) -> Any:
        """The JSON reply (None where the body is empty or plain text)."""
        async with self._request("GET", url, path, None, silence_s) as response:
            return _json(url + path, await response.read())

    async def post(self, url: str, path: str, body: Mapping[str, Any], silence_s: float | None = None) -> Any:
        async with self._request("POST", url, path, _encoded(body), silence_s) as response:
            return _json(url + path, await response.read())

    async def delete(self, url: str, path: str) -> Any:
        async with self._request("DELETE", url, path, None, None) as response:
            return _json(url + path, await response.read())

    async def post_bytes(self, url: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        """The reply as it is."""
        headers = {"Content-Type": "application/octet-stream", **headers}
        async with self._request("POST", url, path, body, None, headers) as response:
            return await response.read()

    async def stream(self, url: str, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any]:
        """The JSON of each server-sent event, up to `[DONE]`. A stream that ends before it is an `EndpointDown`.

        Use with `contextlib.aclosing` where the loop can be left: leaving it hangs up.
        """
        async with self._request("POST", url, path, _encoded(body), None) as response:
            async for line in _lines(response.content):
                if line.startswith(b"data: [DONE]"):
                    return
                if line.startswith(b'data: {"error"'):
                    raise RequestRefused(f"{url}{path}: {_message(line[6:].decode())}")
                if line.startswith(b"data: "):
                    yield orjson.loads(line[6:])
        raise EndpointDown(url, "the stream ended early")

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        url: str,
        path: str,
        data: bytes | None,
        silence_s: float | None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        silence_s = silence_s or self._silence_s
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=min(10.0, silence_s), sock_read=silence_s)
        try:
            async with self._open().request(
                method, url + path, data=data and io.BytesIO(data), timeout=timeout, headers=headers
            ) as response:
                if response.status != 200:
                    await _refuse(url, path, response)
                yield response
        except (TimeoutError, aiohttp.ClientError, ConnectionError) as error:
            if isinstance(error, EndpointDown):
                raise
            if isinstance(error, aiohttp.InvalidURL | aiohttp.NonHttpUrlClientError):
                raise UserError(f"{url} is not a URL such as http://127.0.0.1:30000") from None
            raise EndpointDown(url, _reason(error, silence_s)) from error

    def _open(self) -> aiohttp.ClientSession:
        """Made on first use: a session belongs to the event loop that it was made in."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),  # the fleet bounds the number
                headers={"Content-Type": "application/json", **self._headers},
                read_bufsize=_READ_BYTES,
            )
        return self._session


def _encoded(body: Mapping[str, Any]) -> bytes:
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)  # ids of environments


def _reason(error: Exception, silence_s: float) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return "cannot connect"
    if isinstance(error, TimeoutError):
        return f"no answer for {silence_s:g} s"
    return " ".join(str(error).split()) or type(error).__name__


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The lines of a body. Not `async for line in content`, which refuses a line of many megabytes (routed experts)."""
    line: list[bytes] = []
    async for part in content.iter_any():
        head, *rest = part.split(b"\n")
        line.append(head)
        for start_of_next in rest:
            yield b"".join(line)
            line = [start_of_next]


def _json(address: str, body: bytes) -> Any:
    try:
        return orjson.loads(body) if body[:1] in (b"{", b"[") else None
    except orjson.JSONDecodeError:
        raise RequestRefused(f"{address} answered what is no JSON; check the URL") from None


async def _refuse(url: str, path: str, response: aiohttp.ClientResponse) -> None:
    """Raise what a status other than 200 means."""
    text = (await response.text(errors="replace"))[:2000]
    if response.status in _BUSY and (seconds := response.headers.get("Retry-After", "")).isdigit():
        raise EndpointBusy(url, f"{path} answered {response.status} {_message(text)}".strip(), float(seconds))
    if response.status in _BROKEN:
        raise EndpointDown(url, f"{path} answered {response.status} {_message(text)}".strip())
    if response.status == 404:
        raise RequestRefused(f"{url} has no {path}; is the URL right? It said: {_message(text)}")
    if response.status in (401, 403):
        raise RequestRefused(
            f"{url} asks for a key, or for another one; set api_key_env of its table to the variable that holds it"
        )
    raise RequestRefused(f"{url}{path} answered {response.status}: {_message(text)}")


def _message(text: str) -> str:
    """The server's own words, on one line."""
    try:
        reply = orjson.loads(text)
    except orjson.JSONDecodeError:
        return " ".join(text.split())[:300]
    while isinstance(reply, dict) and "error" in reply:
        reply = reply["error"]
    message = reply.get("message", reply) if isinstance(reply, dict) else reply
    return " ".join(str(message).split())[:300]
