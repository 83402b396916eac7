"""The HTTP interface of the teacher service: aiohttp handlers. See docs/teacher_service.md.

Every path but /health asks for the key, if there is one. What is refused is answered with {"error": ...} and a status
that says whose turn it is: 400 the body, 401 the key, 404 the teacher or path, 409 another temperature, checkpoint or
body than before, 429 and 503 later or elsewhere (Retry-After), 500 the model.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import cast

import orjson
from aiohttp import web

from megatron_mopd.service.body import BadBody, ScoreCall, ScoreReply, decode_call, encode_reply, split
from megatron_mopd.service.checks import Refusal, Served, check_call
from megatron_mopd.service.metrics import Metrics
from megatron_mopd.service.replies import RETRY_AFTER_S, Replies
from megatron_mopd.service.work import WorkQueue
from megatron_mopd.token_rows import TokenRows

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
JSON = "application/json"
BINARY = "application/octet-stream"
HEALTH = "/health"


class Api:
    """`state()` says why no work is taken now, or None."""

    def __init__(
        self,
        served: Mapping[str, Served],
        temperature: float,
        queue: WorkQueue,
        state: Callable[[], str | None],
        key: str | None,
        max_body_bytes: int,
    ):
        self._served, self._temperature, self._queue, self._state = served, temperature, queue, state
        self._key = f"Bearer {key}".encode() if key else None
        self._metrics = Metrics()
        self._replies = Replies(queue, self._check_ready)
        self.app = web.Application(middlewares=[self._answer], client_max_size=max_body_bytes)
        self.app.add_routes(
            [
                web.get(HEALTH, self._health),
                web.get("/ready", self._ready),
                web.get("/teachers", self._teachers),
                web.get("/metrics", self._get_metrics),
                web.post("/score", self._score),
            ]
        )

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        started = time.monotonic()
        try:
            self._check_key(request)
            response = await handler(request)
        except Refusal as refusal:
            response = _error(refusal.status, refusal.message)
            if refusal.retry_after_s is not None:
                response.headers["Retry-After"] = str(refusal.retry_after_s)
        except web.HTTPException as error:  # aiohttp's own: no such path, another method, too large a body
            response = _error(error.status, error.text or error.reason)
        if request.path == "/score":
            self._metrics.answered(response.status, time.monotonic() - started)
        return response

    def _check_key(self, request: web.Request) -> None:
        given = request.headers.get("Authorization", "").encode(errors="replace")
        if self._key and request.path != HEALTH and not hmac.compare_digest(given, self._key):
            raise Refusal(401, "the key is missing or another one; send Authorization: Bearer KEY")

    def _check_ready(self) -> None:
        if reason := self._state():
            raise Refusal(503, reason, RETRY_AFTER_S)

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({})

    async def _ready(self, _: web.Request) -> web.Response:
        self._check_ready()
        return web.json_response({})

    async def _teachers(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                name: {
                    "fingerprint": teacher.fingerprint,
                    "vocab_size": teacher.vocab_size,
                    "max_tokens": teacher.max_tokens,
                    "temperature": self._temperature,
                }
                for name, teacher in self._served.items()
            }
        )

    async def _get_metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=self._metrics.text(self._queue), content_type="text/plain")

    async def _score(self, request: web.Request) -> web.Response:
        body, in_json = await _read(request), request.content_type == JSON
        try:
            call = _from_json(body) if in_json else decode_call(body)
        except BadBody as error:
            raise Refusal(400, f"the body is refused: {error}") from None
        check_call(call, self._served, self._temperature)
        key = request.headers.get("Idempotency-Key", "")
        if not key.isascii():
            raise Refusal(400, "the Idempotency-Key is not of ASCII characters")
        scores = await self._replies.scores(key, call)
        fingerprint = self._served[call.teacher].fingerprint
        if in_json:
            rows = [row.tolist() for row in split(scores.logprobs, call.rows.response_lengths)]
            return web.json_response({"logprobs": rows, "fingerprint": fingerprint})
        reply = ScoreReply(call.teacher, fingerprint, key, scores.logprobs, scores.hidden)
        return web.Response(body=encode_reply(reply), content_type=BINARY)


async def _read(request: web.Request) -> bytes:
    try:
        return await request.read()
    except web.RequestPayloadError as error:  # it is cut, or not of the Content-Encoding that it is said to have
        raise Refusal(400, f"the body cannot be read: {' '.join(str(error).split())}") from None


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)


def _from_json(body: bytes) -> ScoreCall:
    """{"teacher": ..., "prompts": [[...]], "responses": [[...]]}, and, if the caller wants them checked, "temperature"
    and "fingerprint"."""
    try:
        call = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadBody(f"it is no JSON ({error})") from None
    if not isinstance(call, dict) or not {"teacher", "prompts", "responses"} <= call.keys():
        raise BadBody("it must be an object with teacher, prompts and responses")
    if unknown := call.keys() - {"teacher", "prompts", "responses", "temperature", "fingerprint"}:
        raise BadBody(f"{sorted(unknown)[0]} is no field of it")
    prompts, responses = _token_ids(call["prompts"], "prompts"), _token_ids(call["responses"], "responses")
    if len(prompts) != len(responses):
        raise BadBody(f"{len(prompts)} prompts, but {len(responses)} responses")
    temperature = call.get("temperature")
    if temperature is not None and type(temperature) not in (int, float):
        raise BadBody("temperature is no number")
    if not isinstance(call["teacher"], str):
        raise BadBody("teacher is no name")
    return ScoreCall(call["teacher"], TokenRows.of(prompts, responses), temperature, call.get("fingerprint"))


def _token_ids(rows: object, name: str) -> list[list[int]]:
    whole = isinstance(rows, list) and all(
        isinstance(row, list) and all(type(x) is int and abs(x) < 1 << 31 for x in row) for row in rows
    )
    if not whole:
        raise BadBody(f"{name} must be lists of token ids")
    return cast(list[list[int]], rows)
