"""The client of a teacher service: one service URL, any of the teachers that it serves.

A batch is one binary POST. Its Idempotency-Key is a hash of what is asked, so that a batch that is sent again, after a
reply was lost or came cut, is not scored again. Every reply is checked: version, key, teacher, number of log-probs (and
number and width of hidden states, where they are asked for), all of them finite, and the fingerprint, which is the one
of this run's own checkpoint or the run ends.

Promises (tests/unit/test_service_client.py): implements protocols.HiddenScorer; what is not a whole and right reply is
EndpointDown with the reason; other weights under a teacher's name are a UserError, at once, never a score. Torch-free.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_mopd.client import Client, EndpointBusy
from megatron_mopd.config import Config
from megatron_mopd.errors import UserError
from megatron_mopd.hf_folder import read_hf_config
from megatron_mopd.protocols import EndpointDown, ScoreRequest
from megatron_mopd.scores import Scores, problem_of_hidden
from megatron_mopd.servers.launch import endpoints
from megatron_mopd.service.arguments import NAME, api_key
from megatron_mopd.service.body import BadBody, ScoreCall, ScoreReply, decode_reply, encode_call, split
from megatron_mopd.teachers.identity import Fingerprint, fingerprint
from megatron_mopd.token_rows import TokenRows

PROBE_SILENCE_S = 10.0
MIN_PAUSE_S = 0.1


def teacher_endpoints(config: Config) -> dict[str, list[ServiceClient]]:
    """The services of each teacher on the backend megatron: those given by URL, or the one started for this run."""
    urls = config.service.urls or (endpoints(config.run.folder)[NAME],)
    services = [ServiceClient(url, config) for url in urls]
    return {teacher.name: services for teacher in config.teachers.on("megatron")}


class ServiceClient:
    """Implements protocols.HiddenScorer for the teachers of `config` on the backend megatron."""

    def __init__(self, url: str, config: Config):
        self.url = url
        self._teachers = {teacher.name: teacher for teacher in config.teachers.on("megatron")}
        self._identities: dict[str, Fingerprint] = {}
        self._temperature, self._max_response_tokens = config.rollout.temperature, config.rollout.max_response_tokens
        self._attempt_timeout_s = config.teachers.attempt_timeout_s
        self._client = Client(silence_s=self._attempt_timeout_s, api_key=api_key(config))

    async def prepare(self, teacher: str) -> None:
        identity = await self._identity(teacher)
        await self._client.get(self.url, "/ready", PROBE_SILENCE_S)
        teachers = await self._client.get(self.url, "/teachers", PROBE_SILENCE_S)
        served = _entry(self.url, teachers, teacher)
        self._check_fingerprint(teacher, served["fingerprint"], identity)
        expected = {"vocab_size": identity.vocab_size, "temperature": self._temperature}
        for name, value in expected.items():
            if served[name] != value:
                raise UserError(
                    f"service {self.url} serves teacher {teacher} with {name} {served[name]}, this run has {value}; "
                    "start it with the configuration of the run"
                )
        if served["max_tokens"] <= self._max_response_tokens:
            raise UserError(
                f"teacher {teacher} takes {served['max_tokens']} tokens, prompt included; lower "
                f"rollout.max_response_tokens={self._max_response_tokens} or use another teacher"
            )

    async def score(self, teacher: str, requests: Sequence[ScoreRequest]) -> list[np.ndarray]:
        return [scores.logprobs for scores in await self._score(teacher, requests, with_hidden=False)]

    async def score_hidden(self, teacher: str, requests: Sequence[ScoreRequest]) -> list[Scores]:
        return await self._score(teacher, requests, with_hidden=True)

    async def _score(self, teacher: str, requests: Sequence[ScoreRequest], with_hidden: bool) -> list[Scores]:
        identity = await self._identity(teacher)
        rows = TokenRows.of([r.prompt_ids for r in requests], [r.response_ids for r in requests])
        _check_rows(requests, rows, identity.vocab_size)
        lengths = rows.response_lengths
        if not rows.num_response_tokens:
            return [_nothing(self._width(teacher) if with_hidden else None) for _ in requests]
        call = ScoreCall(teacher, rows, self._temperature, str(identity), with_hidden)
        key = call.digest().hex()
        body = await self._post(encode_call(call, identity.vocab_size), key)
        reply = self._checked(body, key, teacher, identity, rows.num_response_tokens)
        if not with_hidden:
            return [Scores(logprobs) for logprobs in split(reply.logprobs, lengths)]
        hidden = self._checked_hidden(reply.hidden, teacher, rows.num_response_tokens)
        return [Scores(*row) for row in zip(split(reply.logprobs, lengths), split(hidden, lengths), strict=True)]

    async def close(self) -> None:
        await self._client.close()

    async def _post(self, body: bytes, key: str) -> bytes:
        """Come again when a full or ending service says so, as long as one attempt may take."""
        deadline = time.monotonic() + self._attempt_timeout_s
        while True:
            try:
                return await self._client.post_bytes(self.url, "/score", body, {"Idempotency-Key": key})
            except EndpointBusy as busy:
                pause_s = max(busy.retry_after_s, MIN_PAUSE_S)
                if time.monotonic() + pause_s > deadline:
                    raise
                await asyncio.sleep(pause_s)

    def _checked(self, body: bytes, key: str, teacher: str, identity: Fingerprint, num_tokens: int) -> ScoreReply:
        """A reply with the right log-probs [num_tokens]."""
        try:
            reply = decode_reply(body)
        except BadBody as error:
            raise EndpointDown(self.url, f"its reply is refused: {error}") from None
        if reply.key != key or reply.teacher != teacher:
            raise EndpointDown(self.url, f"it answered another request, for teacher {reply.teacher}")
        self._check_fingerprint(teacher, reply.fingerprint, identity)
        if len(reply.logprobs) != num_tokens:
            raise EndpointDown(self.url, f"it sent {len(reply.logprobs)} log-probs for {num_tokens} response tokens")
        if not np.isfinite(reply.logprobs).all():
            raise EndpointDown(self.url, "it sent a log-prob that is not finite")
        return reply

    def _checked_hidden(self, hidden: np.ndarray | None, teacher: str, num_tokens: int) -> np.ndarray:
        """[num_tokens, D]"""
        if problem := problem_of_hidden(hidden, num_tokens):
            raise EndpointDown(self.url, f"it sent {problem}")
        assert hidden is not None
        if hidden.shape[1] != (width := self._width(teacher)):
            raise EndpointDown(self.url, f"it sent hidden states of width {hidden.shape[1]}, the teacher's is {width}")
        return hidden

    def _width(self, teacher: str) -> int:
        return _hidden_size(self._teachers[teacher].checkpoint)

    def _check_fingerprint(self, teacher: str, served: str, identity: Fingerprint) -> None:
        if served != str(identity):
            raise UserError(
                f"service {self.url} serves other weights as teacher {teacher}: fingerprint {served}, expected "
                f"{identity} of {self._teachers[teacher].checkpoint}; start it with the configuration of the run"
            )

    async def _identity(self, name: str) -> Fingerprint:
        if name not in self._teachers:
            raise UserError(f"no teacher named {name}; known: {', '.join(self._teachers)}")
        if name not in self._identities:
            teacher = self._teachers[name]
            words = (teacher.checkpoint, teacher.megatron_checkpoint, f"teacher {name}")
            self._identities[name] = await asyncio.to_thread(_fingerprint, *words)
        return self._identities[name]


@functools.cache
def _hidden_size(checkpoint: Path) -> int:
    return read_hf_config(checkpoint)["hidden_size"]


def _nothing(width: int | None) -> Scores:
    """Of an empty response."""
    return Scores(np.zeros(0, np.float32), None if width is None else np.zeros((0, width), np.float32))


@functools.cache
def _fingerprint(checkpoint: Path, megatron_checkpoint: Path | None, key: str) -> Fingerprint:
    return fingerprint(checkpoint, megatron_checkpoint, key)


def _entry(url: str, teachers: Any, name: str) -> dict[str, Any]:
    """What GET /teachers says of one."""
    if not isinstance(teachers, dict) or not all(isinstance(served, dict) for served in teachers.values()):
        raise UserError(f"{url}/teachers answers no table of teachers; is it a teacher service?")
    if name not in teachers:
        raise UserError(
            f"service {url} has no teacher {name}, but {', '.join(teachers) or 'none'}; start it with the "
            "configuration of the run, or correct service.urls"
        )
    served = teachers[name]
    if missing := {"fingerprint", "vocab_size", "max_tokens", "temperature"} - served.keys():
        raise UserError(f"{url}/teachers does not say the {sorted(missing)[0]} of {name}; is it a teacher service?")
    return served


def _check_rows(requests: Sequence[ScoreRequest], rows: TokenRows, vocab_size: int) -> None:
    if not rows.prompt_lengths.all():
        name = requests[int(rows.prompt_lengths.argmin())].trajectory_id
        raise UserError(f"{name}: an empty prompt leaves the first response token without context")
    outside = (rows.token_ids < 0) | (rows.token_ids >= vocab_size)
    if outside.any():
        token = int(outside.argmax())
        name = requests[rows.row_of_token[token]].trajectory_id
        raise UserError(f"{name}: token id {rows.token_ids[token]}, the teacher's vocabulary has {vocab_size} tokens")
