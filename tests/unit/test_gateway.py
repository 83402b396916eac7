"""Laws of the gateway's HTTP: every mistake is an error in OpenAI's shape, and no client can lose or fork a log."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from chat import FORGETFUL, hermes_renderer, xtml_renderer
from scripted import ScriptedTexts, by_trajectory

from megatron_mopd.errors import UserError
from megatron_mopd.prompts.render import Renderer
from megatron_mopd.rollout import gateway_http
from megatron_mopd.rollout.chat_session import Session
from megatron_mopd.rollout.gateway import Gateway
from megatron_mopd.types import Prompt, Trajectory

PROMPT = Prompt("p", "agents", "", "tool", ())
SEVEN = "<|open|>think<|sep|>hm<|close|><|open|>response<|sep|>7<|close|><|end_of_msg|>"
ASK: dict[str, Any] = {"model": "student", "messages": [{"role": "user", "content": "What is at A?"}]}
Body = Callable[["World"], Awaitable[None]]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return xtml_renderer(tmp_path_factory.mktemp("xtml"))


class World:
    """A gateway on a script, a session of it, and a bare HTTP client."""

    def __init__(self, renderer: Renderer, **options: Any):
        self.engine = ScriptedTexts(renderer, [SEVEN, SEVEN])
        self.gateway = Gateway(self.engine, renderer, max_response_tokens=900, max_tokens=2000, **options)
        self.session: Session
        self.http: aiohttp.ClientSession
        self.url = ""

    def client(self, **options: Any) -> openai.AsyncOpenAI:
        options = {"base_url": self.gateway.base_url(self.session), "api_key": "any", "max_retries": 0, **options}
        return openai.AsyncOpenAI(**options)

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, dict[str, Any]]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **options.pop("headers", {})}
        async with self.http.post(self.url + path, data=data, headers=headers, **options) as reply:
            return reply.status, await reply.json()

    async def chat(self, body: Any, **options: Any) -> tuple[int, dict[str, Any]]:
        return await self.post(f"/sessions/{self.session.key}/v1/chat/completions", body, **options)


def play(renderer: Renderer, body: Body, **options: Any) -> None:
    async def whole() -> None:
        world = World(renderer, **options)
        world.url = await world.gateway.start()
        try:
            world.session = await world.gateway.open(PROMPT, "0/p@3")
            async with aiohttp.ClientSession() as world.http:
                await body(world)
        finally:
            await world.gateway.stop()

    asyncio.run(asyncio.wait_for(whole(), 60))


def test_mistakes_are_errors_of_openais_shape(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_http, "MAX_BODY_BYTES", 2000)
    bad = [
        (b"{", {}, 400, "the body is no JSON"),
        (b"\xff\x00", {}, 400, "the body is no JSON"),
        ([], {}, 400, "body: it must be an object"),
        ({"messages": "hi"}, {}, 400, "messages: it must be a list"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, {}, 400, "messages.0: its role must be one of"),
        ({**ASK, "model": "gpt"}, {}, 404, "model 'gpt' is not served; student is"),
        ({**ASK, "user": "x" * 3000}, {}, 413, "Maximum request body size 2000 exceeded"),
        (ASK, {"headers": {"Content-Type": "text/plain"}}, 415, "the body must be application/json, not text/plain"),
        (b"abc", {"headers": {"Content-Encoding": "gzip"}}, 415, "not in the encoding gzip"),
        (b"abc" * 300, {"headers": {"Content-Encoding": "br"}}, 415, "not in the encoding br"),
    ]

    async def body(world: World) -> None:
        for sent, options, status, reason in bad:
            got, reply = await world.chat(sent, **options)
            assert (got, list(reply)) == (status, ["error"]), reply
            assert set(reply["error"]) == {"message", "type", "param", "code"}
            assert reply["error"]["type"] == "invalid_request_error"
            assert reason in reply["error"]["message"]
        for path, status in (("/nothing", 404), ("/health", 405), ("/v1/chat/completions", 400), ("/sessions", 403)):
            got, reply = await world.post(path, ASK)
            assert (got, list(reply)) == (status, ["error"])
        assert (await world.post("/sessions/x/v1/chat/completions", ASK))[1]["error"]["code"] == "session_not_found"
        assert world.engine.asked == []
        status, reply = await world.post("/v1/chat/completions", ASK, headers={"X-Session-Id": world.session.key})
        assert (status, reply["choices"][0]["message"]["content"]) == (200, "7")

    play(renderer, body)


def test_the_openai_client_understands_refusals(renderer: Renderer) -> None:
    async def body(world: World) -> None:
        async with world.client(max_retries=3) as client:
            assert [model.id async for model in await client.models.list()] == ["student"]
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(**ASK, n=2)
            assert (caught.value.param, caught.value.code) == ("n", "unsupported_value")
            answer = await client.chat.completions.create(**ASK)
            stripped = {"role": "assistant", "content": answer.choices[0].message.content}
            more = [*ASK["messages"], stripped, {"role": "user", "content": "Sure?"}]
            with pytest.raises(openai.BadRequestError, match="message 1 comes without its reasoning_content") as caught:
                await client.chat.completions.create(model="student", messages=more)
            assert (caught.value.param, caught.value.code) == ("messages.1", "reasoning_stripped")

    play(renderer, body)


def test_without_the_key_nothing_is_served(renderer: Renderer) -> None:
    with pytest.raises(
        UserError, match=r"gateway.host=0.0.0.0 can be reached from other machines; set gateway.api_key"
    ):
        Gateway(ScriptedTexts(renderer, []), renderer, max_response_tokens=1, max_tokens=9, host="0.0.0.0")

    async def body(world: World) -> None:
        for key in ("any", "secre", "sëcret"):
            status, reply = await world.chat(ASK, headers={"Authorization": f"Bearer {key}"})
            assert (status, reply["error"]["code"]) == (401, "invalid_api_key")
        async with world.client(api_key="secret") as client:
            assert (await client.chat.completions.create(**ASK)).choices[0].message.content == "7"

    play(renderer, body, api_key="secret")


def test_a_client_that_hangs_up_in_a_stream_finds_its_answer(renderer: Renderer) -> None:
    """The turn is sampled once, and the same request gets it, streamed or not."""

    async def body(world: World) -> None:
        world.engine.may_speak.clear()
        path = f"{world.gateway.base_url(world.session)}/chat/completions"
        reply = await world.http.post(path, json={**ASK, "stream": True})
        assert reply.status == 200
        reply.close()
        world.engine.may_speak.set()
        async with world.client() as client:
            answer = await client.chat.completions.create(**ASK)
            said = [event async for event in await client.chat.completions.create(**ASK, stream=True)]
        assert answer.choices[0].message.content == "7"
        assert "".join(event.choices[0].delta.content or "" for event in said) == "7"
        assert len(world.engine.asked) == 1
        t = await world.gateway.close(world.session)
        assert t is not None
        assert t.response_ids.tolist() == by_trajectory(world.engine.sampled)[t.id]

    play(renderer, body)


def test_a_stream_waits_with_comments(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_http, "KEEP_ALIVE_S", 0.01)

    async def body(world: World) -> None:
        world.engine.may_speak.clear()
        path = f"{world.gateway.base_url(world.session)}/chat/completions"
        async with world.http.post(
            path, json={**ASK, "stream": True, "stream_options": {"include_usage": True}}
        ) as reply:
            assert await reply.content.readline() == b": the student is speaking\n"
            world.engine.may_speak.set()
            events = [line for line in (await reply.text()).splitlines() if line.startswith("data: ")]
        assert events[-1] == "data: [DONE]"
        rows = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
        assert rows[-1]["usage"]["completion_tokens"] == len(world.engine.sampled["0/p@3"][0].token_ids)
        assert rows[-2]["choices"][0]["finish_reason"] == "stop"

    play(renderer, body)


def test_an_engine_that_fails_is_a_server_error(renderer: Renderer, capsys: pytest.CaptureFixture[str]) -> None:
    async def body(world: World) -> None:
        world.engine.error = FloatingPointError("no numbers")
        async with world.client() as client:
            with pytest.raises(openai.InternalServerError, match="cannot be sampled: FloatingPointError") as caught:
                await client.chat.completions.create(**ASK)
            assert caught.value.code == "engine_failed"
            events = await client.chat.completions.create(**ASK, stream=True)
            with pytest.raises(openai.APIError, match="cannot be sampled"):
                await anext(aiter(events))
            world.engine.error = None
            assert (await client.chat.completions.create(**ASK)).choices[0].message.content == "7"

    play(renderer, body)
    assert "gateway: FloatingPointError: no numbers" in capsys.readouterr().err


def test_a_session_that_ends_while_its_client_waits_is_said_to_have_ended(renderer: Renderer) -> None:
    async def body(world: World) -> None:
        world.engine.may_speak.clear()
        waiting = asyncio.create_task(world.chat(ASK))
        while not world.engine.asked:
            await asyncio.sleep(0.001)
        assert await world.gateway.close(world.session) is None
        status, reply = await waiting
        assert (status, reply["error"]["code"]) == (410, "session_ended")

    play(renderer, body)


def test_clients_may_open_and_end_sessions_where_the_owner_lets_them(renderer: Renderer) -> None:
    finished: list[Trajectory] = []

    async def keep(trajectory: Trajectory) -> None:
        finished.append(trajectory)

    async def body(world: World) -> None:
        status, reply = await world.post("/sessions", {"domain": "agents"})
        assert status == 201
        async with world.client(base_url=f"{world.url}{reply['base_path']}") as client:
            await client.chat.completions.create(**ASK)
        for wanted in (200, 404):
            async with world.http.delete(f"{world.url}/sessions/{reply['id']}") as ended:
                assert ended.status == wanted
                summary = await ended.json()
                if wanted == 200:
                    assert (summary["finish_reason"], summary["rerendered"]) == ("stop", {"exact": 1})
        assert [t.prompt.prompt.domain for t in finished] == ["agents"]
        assert (await world.post("/sessions", b"["))[0] == 400

    def new_prompt(row: Any) -> Prompt:
        return Prompt("x", row["domain"], "", "", ())

    play(renderer, body, new_prompt=new_prompt, on_finished=keep)


def test_a_template_that_drops_thinking_is_refused_at_start(renderer: Renderer, tmp_path: Path) -> None:
    forgetful = hermes_renderer(tmp_path, FORGETFUL)
    with pytest.raises(UserError, match="writes what is up to message 1 in another way once more follows"):
        Gateway(ScriptedTexts(forgetful, []), forgetful, max_response_tokens=9, max_tokens=99)
