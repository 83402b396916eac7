"""Token in, token out for an external agent harness: an OpenAI-compatible server that records trajectories.

    gateway = Gateway(engine, renderer, max_response_tokens=..., max_tokens=...)
    await gateway.start()
    session = await gateway.open(prompt, "0/p-17@3")        # the harness gets gateway.base_url(session)
    trajectory = await gateway.close(session)               # once it has played

The harness speaks in messages; the gateway keeps the token ids. It refuses at start a template that drops thinking, and
on the way a harness that drops or rewrites what was said (chat_history.py). The prompt of the trajectory is what the
harness sends first; of the given prompt, domain, effort and everything else is kept. See docs/gateway.md.

Promises: tests/contract/test_external_client.py, tests/unit/test_gateway.py.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from megatron_mopd.errors import UserError
from megatron_mopd.prompts.render import Renderer
from megatron_mopd.prompts.spelling import Spelling
from megatron_mopd.protocols import RolloutEngine
from megatron_mopd.rollout.chat_request import Refused
from megatron_mopd.rollout.chat_session import Session, Speaker
from megatron_mopd.rollout.gateway_http import UNPACKS, ChatApi
from megatron_mopd.rollout.thinking import check_thinking
from megatron_mopd.rollout.tool_calls import turn_parser
from megatron_mopd.servers.addresses import check_host, url_of
from megatron_mopd.types import Prompt, Trajectory

MODEL = "student"
SHUTDOWN_S = 2.0
_PROBE = '{"key":  "A"}'

NewPrompt = Callable[[Mapping[str, Any]], Prompt]
OnFinished = Callable[[Trajectory], Awaitable[None]]


class Gateway:
    """`new_prompt` makes the prompt of a session that a client asks for; `on_finished` gets what a client has finished.

    Raises UserError for a template that drops thinking, and for a host that others reach without a key.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        renderer: Renderer,
        *,
        max_response_tokens: int,
        max_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        new_prompt: NewPrompt | None = None,
        on_finished: OnFinished | None = None,
    ):
        check_host("gateway", host, has_key=api_key is not None)
        check_thinking(renderer)
        self.model, self._host, self._port = MODEL, host, port
        self._speaker = Speaker(
            engine,
            renderer,
            Spelling(renderer),
            turn_parser(renderer),
            _takes_text(renderer),
            max_response_tokens,
            max_tokens,
            temperature,
            top_p,
        )
        self._sessions: dict[str, Session] = {}
        self._new_prompt, self._on_finished = new_prompt, on_finished
        self._runner = web.AppRunner(
            ChatApi(self, api_key).app, access_log=None, shutdown_timeout=SHUTDOWN_S, auto_decompress=UNPACKS
        )
        self._url = ""

    async def start(self) -> str:
        """The URL, once it answers."""
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except OSError as error:
            await self._runner.cleanup()
            reason = f"{error.strerror}; set another, or 0 for a free one"
            raise UserError(f"gateway.port={self._port}: {reason}") from None
        self._url = url_of(self._host, self._runner.addresses[0][1])
        return self._url

    async def stop(self) -> None:
        """Nobody is answered any more; sessions that were not closed are lost."""
        for session in self._sessions.values():
            session.cancel()
        await self._runner.cleanup()

    async def open(self, prompt: Prompt, trajectory_id: str | None = None) -> Session:
        """A trajectory begins. The noise of its tokens belongs to its id."""
        key = secrets.token_hex(8)
        session = self._sessions[key] = Session(key, trajectory_id or f"{prompt.id}@{key}", prompt, self._speaker)
        return session

    def base_url(self, session: Session) -> str:
        """For the `base_url` of a client of OpenAI's interface."""
        return f"{self._url}/sessions/{session.key}/v1"

    async def close(self, session: Session) -> Trajectory | None:
        """All that was said; None if nothing was sampled. Raises what the engine raised if that was the last word."""
        del self._sessions[session.key]
        return await session.end()

    def session(self, key: str) -> Session:
        if key not in self._sessions:
            raise Refused(404, f"there is no session {key}, or it has ended", "session_not_found")
        return self._sessions[key]

    async def begin(self, row: Mapping[str, Any]) -> Session:
        if self._new_prompt is None:
            raise Refused(403, "sessions are opened by the driver of this run, not by clients")
        return await self.open(self._new_prompt(row))

    async def finish(self, key: str) -> Mapping[str, Any]:
        """A client has ended its session. One that the driver opened stays until the driver closes it."""
        session = self.session(key)
        if self._on_finished is None:
            raise Refused(403, "this session is ended by the driver of this run, not by clients")
        trajectory = await self.close(session)
        if trajectory is None:
            return {"id": session.key, "trajectory": None}
        await self._on_finished(trajectory)
        return {
            "id": session.key,
            "trajectory": trajectory.id,
            "finish_reason": trajectory.finish_reason,
            "response_tokens": len(trajectory.response_ids),
            "sampled_tokens": int(trajectory.loss_mask.sum()),
            "bad_calls": session.num_bad_calls,
            "rerendered": dict(session.rerendered),
        }


def _takes_text(renderer: Renderer) -> bool:
    """Whether the template writes arguments of calls that are JSON text as they are; others want them as objects."""
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": _PROBE}}
    message = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": [call]}
    try:
        text = renderer.text([{"role": "user", "content": "Look."}, message], None, "a call with arguments as text")
    except UserError:
        return False
    return _PROBE in text and json.dumps(_PROBE) not in text
