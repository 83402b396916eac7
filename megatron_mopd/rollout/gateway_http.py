"""The HTTP interface of the gateway: aiohttp handlers. See docs/gateway.md.

    POST /sessions/{key}/v1/chat/completions    or /v1/chat/completions with the header X-Session-Id
    GET  /sessions/{key}/v1/models              or /v1/models
    POST /sessions                              a new session, where the gateway makes some for clients
    DELETE /sessions/{key}                      it has ended
    GET  /health                                without a key

Every error is {"error": {"message", "type", "param", "code"}}. Promises: tests/unit/test_gateway.py.
"""

from __future__ import annotations

import asyncio
import hmac
import sys
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import orjson
from aiohttp import web

from megatron_mopd.errors import UserError
from megatron_mopd.rollout import chat_reply
from megatron_mopd.rollout.chat_request import ChatRequest, Refused, read_request
from megatron_mopd.rollout.chat_session import Answer, Session

MAX_BODY_BYTES = 1 << 26
KEEP_ALIVE_S = 10.0
"""Between the comments of a stream that waits for its turn."""
UNPACKS = False
"""A few bytes may unpack to gigabytes, and aiohttp hangs up where they do not unpack."""
HEALTH = "/health"
HEADER = "X-Session-Id"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Sessions(Protocol):
    """What the handlers need of the gateway."""

    model: str

    def session(self, key: str) -> Session:
        """Raises Refused where there is none."""
        ...

    async def begin(self, row: Mapping[str, Any]) -> Session: ...

    async def finish(self, key: str) -> Mapping[str, Any]: ...


class ChatApi:
    def __init__(self, sessions: Sessions, api_key: str | None):
        self._sessions = sessions
        self._key = f"Bearer {api_key}".encode() if api_key else None
        self.app = web.Application(middlewares=[self._answer], client_max_size=MAX_BODY_BYTES)
        self.app.add_routes([web.get(HEALTH, self._health), web.post("/sessions", self._begin)])
        self.app.add_routes([web.delete("/sessions/{key}", self._finish)])
        for prefix in ("", "/sessions/{key}"):
            self.app.add_routes([web.post(f"{prefix}/v1/chat/completions", self._chat)])
            self.app.add_routes([web.get(f"{prefix}/v1/models", self._models)])

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._check_key(request)
            return await handler(request)
        except Refused as refused:
            return _refusal(refused)
        except web.HTTPException as error:  # aiohttp's own: no such path, another method, too large a body
            return _refusal(Refused(error.status, error.text or error.reason))
        except web.RequestPayloadError as error:  # it is cut
            return _refusal(Refused(400, f"the body cannot be read: {' '.join(str(error).split())}"))
        except ConnectionError:
            raise  # the client has hung up
        except Exception as error:  # an engine may raise anything; the owner of the session is told by `close`
            return _refusal(_broken(error))

    def _check_key(self, request: web.Request) -> None:
        given = request.headers.get("Authorization", "").encode(errors="replace")
        if self._key and request.path != HEALTH and not hmac.compare_digest(given, self._key):
            raise Refused(401, "the key is missing or another one", "invalid_api_key")

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({})

    async def _models(self, _: web.Request) -> web.Response:
        row = {"id": self._sessions.model, "object": "model", "created": 0, "owned_by": "megatron_mopd"}
        return web.json_response({"object": "list", "data": [row]})

    async def _begin(self, request: web.Request) -> web.Response:
        try:
            row = orjson.loads(await _body(request))
        except orjson.JSONDecodeError as error:
            raise Refused(400, f"the body is no JSON: {error}") from None
        if not isinstance(row, dict):
            raise Refused(400, "body: it must be an object", None, "body")
        session = await self._sessions.begin(row)
        return web.json_response({"id": session.key, "base_path": f"/sessions/{session.key}/v1"}, status=201)

    async def _finish(self, request: web.Request) -> web.Response:
        return web.json_response(await self._sessions.finish(request.match_info["key"]))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        key = request.match_info.get("key") or request.headers.get(HEADER)
        if not key:
            raise Refused(400, f"name the session: /sessions/KEY/v1 as base URL, or the header {HEADER}")
        session = self._sessions.session(key)
        asked = read_request(await _body(request))
        if asked.model not in ("", self._sessions.model):
            raise Refused(404, f"model {asked.model!r} is not served; {self._sessions.model} is", "model_not_found")
        answer, ident = session.ask(asked), f"chatcmpl-{uuid.uuid4().hex}"
        if asked.stream:
            return await self._stream(request, asked, answer, ident)
        await asyncio.wait([answer])
        row = chat_reply.completion(ident, self._sessions.model, _outcome(answer))
        return web.Response(body=orjson.dumps(row), content_type="application/json")

    async def _stream(
        self, request: web.Request, asked: ChatRequest, answer: asyncio.Future[Answer], ident: str
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        try:
            await response.prepare(request)
            while not (await asyncio.wait([answer], timeout=KEEP_ALIVE_S))[0]:
                await response.write(b": the student is speaking\n\n")
            try:
                pieces = chat_reply.stream(ident, self._sessions.model, _outcome(answer), asked.with_usage)
            except Refused as refused:
                pieces = [chat_reply.event(chat_reply.error(refused))]
            for piece in pieces:
                await response.write(piece)
            await response.write_eof()
        except ConnectionError:  # the client has hung up; its turn is recorded all the same
            answer.cancel()
        return response


async def _body(request: web.Request) -> bytes:
    """Of JSON alone: a page in somebody's browser cannot send that here without asking."""
    if request.content_type != "application/json":
        raise Refused(415, f"the body must be application/json, not {request.content_type}")
    if encoding := request.headers.get("Content-Encoding"):
        raise Refused(415, f"the body must be sent as it is, not in the encoding {encoding}")
    return await request.read()


def _outcome(answer: asyncio.Future[Answer]) -> Answer:
    if answer.cancelled():
        raise Refused(410, "the session was ended while the student spoke", "session_ended")
    if (error := answer.exception()) is not None:
        raise _broken(error)
    return answer.result()


def _broken(error: BaseException) -> Refused:
    print(f"gateway: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    reason = str(error) if isinstance(error, UserError) else type(error).__name__
    return Refused(500, f"the student cannot be sampled: {reason}", "engine_failed")


def _refusal(refused: Refused) -> web.Response:
    body = orjson.dumps(chat_reply.error(refused))
    retry = "true" if refused.status >= 500 else "false"
    headers = {"x-should-retry": retry}
    return web.Response(body=body, status=refused.status, content_type="application/json", headers=headers)
