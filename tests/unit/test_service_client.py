"""The client of the teacher service, against the real front and against servers that answer wrongly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from safetensors.numpy import save, save_file
from scoring import MAX_TOKENS, TEACHERS, WIDTH, Scoring, config_of, formula, hidden_of, rows, scoring, until
from tiny import VOCAB_SIZE

from megatron_mopd.config import Config
from megatron_mopd.errors import UserError
from megatron_mopd.protocols import EndpointDown, ScoreRequest
from megatron_mopd.service import client as module
from megatron_mopd.service.body import ScoreReply, decode_call, encode_reply
from megatron_mopd.service.client import ServiceClient, teacher_endpoints
from megatron_mopd.service.front import Served
from megatron_mopd.teachers.identity import fingerprint

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def write_teacher(folder: Path, seed: int) -> None:
    """What a fingerprint is made of."""
    folder.mkdir()
    save_file({"w": np.full((4, 4), seed, np.float32)}, folder / "model.safetensors")
    config = {"architectures": ["X"], "vocab_size": VOCAB_SIZE, "hidden_size": WIDTH}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {f"t{i}": i for i in range(VOCAB_SIZE)}}}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    for seed, name in enumerate(TEACHERS):
        write_teacher(tmp_path / name, seed)
    return config_of(tmp_path)


def served_by(config: Config, **changed: Any) -> dict[str, Served]:
    table = {"vocab_size": VOCAB_SIZE, "max_tokens": MAX_TOKENS, **changed}
    return {t.name: Served(**{"fingerprint": str(fingerprint(t.checkpoint)), **table}) for t in config.teachers.models}


@pytest.fixture
def served(config: Config) -> Iterator[Scoring]:
    with scoring(config, served_by(config)) as running:
        yield running


def requests(count: int = 12, seed: int = 0) -> list[ScoreRequest]:
    prompts, responses = rows(count, seed)
    return [
        ScoreRequest(f"t{i}", tuple(p.tolist()), tuple(r.tolist()))
        for i, (p, r) in enumerate(zip(prompts, responses, strict=True))
    ]


def run(client: ServiceClient, *work: Callable[[ServiceClient], Awaitable[Any]]) -> list[Any]:
    async def body() -> list[Any]:
        try:
            async with asyncio.timeout(20):
                return [await part(client) for part in work]
        finally:
            await client.close()

    return asyncio.run(body())


def score(teacher: str = "a", count: int = 12) -> Callable[[ServiceClient], Awaitable[Any]]:
    return lambda client: client.score(teacher, requests(count))


def test_scores_come_back_row_by_row(config: Config, served: Scoring) -> None:
    client = ServiceClient(served.url, config)
    _, *scores = run(client, lambda c: c.prepare("b"), score("b"), score("a"))
    for teacher, got in zip("ba", scores, strict=True):
        for values, prompt, response in zip(got, *rows(12), strict=True):
            np.testing.assert_array_equal(values, formula(teacher, prompt, response))
            assert values.dtype == np.float32


def test_hidden_states_come_where_they_are_asked_for(config: Config, served: Scoring) -> None:
    """Also where requests with and without them are one batch of work."""
    served.gate.clear()

    async def side_by_side(client: ServiceClient) -> Any:
        asked = [asyncio.create_task(f("a", requests(12))) for f in (client.score, client.score_hidden, client.score)]
        await until(lambda: served.works)
        served.gate.set()
        return await asyncio.gather(*asked)

    ((plain, with_hidden, _),) = run(ServiceClient(served.url, config), side_by_side)
    for logprobs, scores, prompt, response in zip(plain, with_hidden, *rows(12), strict=True):
        np.testing.assert_array_equal(logprobs, formula("a", prompt, response))
        np.testing.assert_array_equal(scores.logprobs, logprobs)
        np.testing.assert_array_equal(scores.hidden, hidden_of("a", response))


def test_nothing_is_asked_where_there_is_nothing_to_score(config: Config, served: Scoring) -> None:
    empty = [ScoreRequest("t", (1,), ())] * 2
    work = (lambda c: c.score("a", []), lambda c: c.score("a", empty), lambda c: c.score_hidden("a", empty))
    none, two, with_hidden = run(ServiceClient(served.url, config), *work)
    assert (none, [len(x) for x in two]) == ([], [0, 0])
    assert [scores.hidden.shape for scores in with_hidden] == [(0, WIDTH)] * 2
    assert not served.works


def test_a_batch_that_is_sent_again_is_scored_once(config: Config, served: Scoring) -> None:
    first, second = run(ServiceClient(served.url, config), score(), score())
    for ours, theirs in zip(first, second, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert served.num_rows == 12


def test_a_run_reaches_the_services_that_are_named(tmp_path: Path, config: Config) -> None:
    urls = ["http://a:1", "http://b:1"]
    named = config.model_copy(update={"service": config.service.model_copy(update={"urls": tuple(urls)})})
    found = teacher_endpoints(named)
    assert {name: [client.url for client in clients] for name, clients in found.items()} == dict.fromkeys("ab", urls)
    assert found["a"][0] is found["b"][0]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"fingerprint": "0123"}, r"serves other weights as teacher a: fingerprint 0123, expected [0-9a-f]{16} of "),
        ({"max_tokens": 8}, r"teacher a takes 8 tokens, prompt included; lower rollout\.max_response_tokens=8"),
        ({"vocab_size": VOCAB_SIZE + 6}, f"teacher a with vocab_size {VOCAB_SIZE + 6}, this run has {VOCAB_SIZE}"),
    ],
)
def test_another_teacher_under_the_same_name_is_refused(config: Config, changed: dict[str, Any], said: str) -> None:
    with scoring(config, served_by(config, **changed)) as served, pytest.raises(UserError, match=said):
        run(ServiceClient(served.url, config), lambda c: c.prepare("a"))


def test_a_checkpoint_that_was_exchanged_while_it_is_served_is_refused_in_the_reply(config: Config) -> None:
    with scoring(config, served_by(config, fingerprint="0123")) as served:
        client = ServiceClient(served.url, config)
        with pytest.raises(UserError, match="teacher a has fingerprint 0123 here"):
            run(client, score())
        assert not served.works


def test_what_the_service_refuses_is_said_in_its_words(config: Config, served: Scoring) -> None:
    client = ServiceClient(served.url, config)
    long = ScoreRequest("t", (1,), (2,) * MAX_TOKENS)
    with pytest.raises(UserError, match=f"row 0 has {MAX_TOKENS + 1} tokens, the teacher takes {MAX_TOKENS}"):
        run(client, lambda c: c.score("a", [long]))
    for request, said in (
        (ScoreRequest("t7", (), (1,)), "t7: an empty prompt"),
        (ScoreRequest("t7", (1,), (VOCAB_SIZE,)), f"t7: token id {VOCAB_SIZE}"),
    ):
        with pytest.raises(UserError, match=said):
            run(client, lambda c, request=request: c.score("a", [request]))
    with pytest.raises(UserError, match="no teacher named law; known: a, b"):
        run(client, score("law"))


def test_a_service_at_another_temperature_is_refused(config: Config) -> None:
    warm = config.model_copy(update={"rollout": config.rollout.model_copy(update={"temperature": 0.7})})
    with scoring(config, served_by(config)) as served:
        with pytest.raises(UserError, match=r"teacher a with temperature 1\.0, this run has 0\.7"):
            run(ServiceClient(served.url, warm), lambda c: c.prepare("a"))
        with pytest.raises(UserError, match=r"temperature 0\.7 is asked for, 1 is served"):
            run(ServiceClient(served.url, warm), score())


def test_a_wrong_key_is_a_mistake_of_the_user(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOPD_KEY", "sesame")
    table = config.service.model_copy(update={"api_key_env": "MOPD_KEY"})
    guarded = config.model_copy(update={"service": table})
    with scoring(guarded, served_by(config)) as served:
        with pytest.raises(UserError, match=r"asks for a key, or for another one; set api_key_env"):
            run(ServiceClient(served.url, config), lambda c: c.prepare("a"))
        run(ServiceClient(served.url, guarded), lambda c: c.prepare("a"), score())


@asynccontextmanager
async def answering(**handlers: Handler) -> AsyncIterator[str]:
    """A server with these handlers at /<name>."""
    app = web.Application()
    app.add_routes([web.route("*", f"/{name}", handler) for name, handler in handlers.items()])
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def ask(config: Config, work: Callable[[ServiceClient], Awaitable[Any]], **handlers: Handler) -> Any:
    async def body() -> Any:
        async with answering(**handlers) as url, asyncio.timeout(20):
            client = ServiceClient(url, config)
            try:
                return await work(client)
            finally:
                await client.close()

    return asyncio.run(body())


def replying(config: Config, change: Callable[[ScoreReply], bytes]) -> Handler:
    """A service that makes the right reply into another one."""

    async def handler(request: web.Request) -> web.Response:
        call = decode_call(await request.read())
        values = [formula(call.teacher, p, r) for p, r in call.rows]
        key = request.headers["Idempotency-Key"]
        print_of = str(fingerprint(config.teachers.models[0].checkpoint))
        return web.Response(body=change(ScoreReply(call.teacher, print_of, key, np.concatenate(values))))

    return handler


def with_(**fields: Any) -> Callable[[ScoreReply], bytes]:
    return lambda reply: encode_reply(ScoreReply(**{**vars(reply), **fields}))


WRONG: list[tuple[str, Callable[[ScoreReply], bytes]]] = [
    ("it sent 65 log-probs for 66 response tokens", lambda r: with_(logprobs=r.logprobs[1:])(r)),
    ("a log-prob that is not finite", lambda r: with_(logprobs=np.where(r.logprobs < -100, np.nan, r.logprobs))(r)),
    ("no whole safetensors byte string", lambda r: encode_reply(r)[:-3]),
    ("no whole safetensors byte string", lambda r: b"<html>"),
    ("no whole safetensors byte string", lambda r: b""),
    ("it answered another request, for teacher a", with_(key="other")),
    ("it answered another request, for teacher b", with_(teacher="b")),
    ("version '2'", lambda r: save({"logprobs": r.logprobs}, {"version": "2"})),
]


@pytest.mark.parametrize(("said", "change"), WRONG)
def test_a_wrong_reply_is_a_failure_of_the_endpoint(
    config: Config, said: str, change: Callable[[ScoreReply], bytes]
) -> None:
    with pytest.raises(EndpointDown, match=said):
        ask(config, score(), score=replying(config, change))
    assert len(ask(config, score(), score=replying(config, encode_reply))) == 12


NO_STATES: list[tuple[str, Callable[[np.ndarray], np.ndarray | None]]] = [
    ("it sent no hidden states", lambda hidden: None),
    (r"hidden states of shape \[65, 6\] for 66 response tokens", lambda hidden: hidden[1:]),
    ("hidden states of width 5, the teacher's is 6", lambda hidden: hidden[:, 1:]),
    ("a hidden state that is not finite", lambda hidden: np.where(hidden == hidden[7, 3], np.uint16(0x7FC0), hidden)),
    ("hidden is F32 .66.", lambda hidden: hidden[:, 0].astype(np.float32)),
]


@pytest.mark.parametrize(("said", "change"), NO_STATES)
def test_wrong_hidden_states_are_a_failure_of_the_endpoint(
    config: Config, said: str, change: Callable[[np.ndarray], np.ndarray | None]
) -> None:
    hidden = np.concatenate([hidden_of("a", response) for response in rows(12)[1]])

    def hidden_score(client: ServiceClient) -> Awaitable[Any]:
        return client.score_hidden("a", requests(12))

    with pytest.raises(EndpointDown, match=said):
        ask(config, hidden_score, score=replying(config, with_(hidden=change(hidden))))
    assert len(ask(config, hidden_score, score=replying(config, with_(hidden=hidden)))) == 12


def test_a_reply_with_another_fingerprint_ends_the_run(config: Config) -> None:
    with pytest.raises(UserError, match="serves other weights as teacher a: fingerprint 0123"):
        ask(config, score(), score=replying(config, with_(fingerprint="0123")))


def test_a_reply_that_breaks_off_is_a_failure_of_the_endpoint(config: Config) -> None:
    async def breaks_off(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b"x" * 500)
        assert request.transport is not None
        request.transport.abort()
        return response

    with pytest.raises(EndpointDown):
        ask(config, score(), score=breaks_off)


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_service_is_asked_again_when_it_says(
    config: Config, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    async def busy(request: web.Request) -> web.StreamResponse:
        keys.append(request.headers["Idempotency-Key"])
        if len(keys) < 4:
            return web.json_response({"error": "full"}, status=status, headers={"Retry-After": "7"})
        return await replying(config, encode_reply)(request)

    keys: list[str] = []
    monkeypatch.setattr(module.asyncio, "sleep", sleep)
    assert len(ask(config, score(), score=busy)) == 12
    assert [seconds for seconds in waited if seconds] == [7.0] * 3  # aiohttp yields with sleep(0)
    assert len(set(keys)) == 1


def test_a_service_that_is_busy_for_longer_than_an_attempt_is_a_failure(config: Config) -> None:
    async def busy(_: web.Request) -> web.Response:
        return web.json_response({"error": "full"}, status=429, headers={"Retry-After": "1"})

    hasty = config.model_copy(update={"teachers": config.teachers.model_copy(update={"attempt_timeout_s": 0.5})})
    with pytest.raises(EndpointDown, match="429 full"):
        ask(hasty, score(), score=busy)


def test_prepare_waits_for_a_service_that_starts_and_refuses_what_is_none(config: Config) -> None:
    async def starting(_: web.Request) -> web.Response:
        return web.json_response({"error": "starting"}, status=503, headers={"Retry-After": "1"})

    async def fine(_: web.Request) -> web.Response:
        return web.json_response({})

    async def junk(_: web.Request) -> web.Response:
        return web.json_response(["a", "b"])

    def prepare(client: ServiceClient) -> Awaitable[None]:
        return client.prepare("a")

    with pytest.raises(EndpointDown, match="503 starting"):
        ask(config, prepare, ready=starting, teachers=fine)
    with pytest.raises(UserError, match="no table of teachers; is it a teacher service"):
        ask(config, prepare, ready=fine, teachers=junk)
    with pytest.raises(UserError, match="has no teacher a, but none; start it with the configuration of the run"):
        ask(config, prepare, ready=fine, teachers=fine)
    with pytest.raises(UserError, match="has no /ready"):
        ask(config, prepare)
    with pytest.raises(EndpointDown, match="cannot connect"):
        run(ServiceClient("http://127.0.0.1:9", config), prepare)
