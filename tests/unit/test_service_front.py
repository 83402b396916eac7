"""The HTTP side of the teacher service over the loopback; a thread answers by a formula in place of Megatron."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
import pytest
from scoring import MAX_TOKENS, TEACHERS, Scoring, config_of, formula, rows, scoring, send, token_rows, until
from tiny import VOCAB_SIZE

from megatron_mopd.errors import UserError
from megatron_mopd.servers.addresses import reserve_port
from megatron_mopd.service import replies as replies_module
from megatron_mopd.service.body import ScoreCall, decode_reply, encode_call
from megatron_mopd.service.front import Front

Body = Callable[[aiohttp.ClientSession], Awaitable[None]]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Scoring]:
    with scoring(config_of(tmp_path)) as running:
        yield running


def run(body: Body, **session: Any) -> None:
    async def main() -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20), **session) as http:
            await body(http)

    asyncio.run(main())


def call_of(teacher: str = "a", count: int = 5, seed: int = 0, **fields: Any) -> bytes:
    words = {"temperature": 1.0, "fingerprint": f"print-{teacher}", **fields}
    return encode_call(ScoreCall(teacher, token_rows(count, seed), **words), VOCAB_SIZE)


def expected(teacher: str = "a", count: int = 5, seed: int = 0) -> np.ndarray:
    return np.concatenate([formula(teacher, p, r) for p, r in zip(*rows(count, seed), strict=True)])


async def ready(http: aiohttp.ClientSession, url: str) -> bool:
    async with http.get(f"{url}/ready") as response:
        return response.status == 200


def test_the_binary_and_the_json_form_agree(served: Scoring) -> None:
    async def body(http: aiohttp.ClientSession) -> None:
        status, headers, reply = await send(http, served.url, call_of(count=30), Idempotency_Key="k")
        assert (status, headers["Content-Type"]) == (200, "application/octet-stream")
        decoded = decode_reply(reply)
        np.testing.assert_array_equal(decoded.logprobs, expected(count=30))
        assert (decoded.teacher, decoded.fingerprint, decoded.key) == ("a", "print-a", "k")
        prompts, responses = ([row.tolist() for row in column] for column in rows(30))
        status, _, reply = await send(http, served.url, {"teacher": "a", "prompts": prompts, "responses": responses})
        said = orjson.loads(reply)
        assert (status, said["fingerprint"], list(map(len, said["logprobs"]))) == (
            200,
            "print-a",
            list(map(len, responses)),
        )
        np.testing.assert_allclose(np.concatenate(said["logprobs"]), decoded.logprobs, rtol=1e-7)

    run(body)


def test_many_clients_of_several_teachers_each_get_their_own_scores(served: Scoring) -> None:
    async def body(http: aiohttp.ClientSession) -> None:
        asked = [(TEACHERS[i % 2], i % 7, i) for i in range(40)]
        replies = await asyncio.gather(*(send(http, served.url, call_of(*ask)) for ask in asked))
        for ask, (status, _, reply) in zip(asked, replies, strict=True):
            assert status == 200
            np.testing.assert_array_equal(decode_reply(reply).logprobs, expected(*ask) if ask[1] else [])
        assert served.num_rows == sum(ask[1] for ask in asked)

    run(body)


JSON = {"teacher": "a", "prompts": [[1]], "responses": [[2]]}
REFUSED: list[tuple[int, str, bytes | dict[str, Any]]] = [
    (404, "no teacher named x; known: a, b", call_of("x")),
    (409, "temperature 0.5 is asked for, 1 is served", call_of(temperature=0.5)),
    (409, "teacher a has fingerprint print-a here, other is asked for", call_of(fingerprint="other")),
    (400, "the body is refused: it is no whole safetensors byte string", call_of()[:-1]),
    (400, "the body is refused: it is no whole safetensors byte string", b"junk"),
    (400, "row 1 has an empty prompt", {**JSON, "prompts": [[1], []], "responses": [[2], [3]]}),
    (
        400,
        f"row 0 has token id {VOCAB_SIZE}, the teacher's vocabulary has {VOCAB_SIZE}",
        {**JSON, "prompts": [[VOCAB_SIZE]]},
    ),
    (400, "row 0 has token id -1", {**JSON, "responses": [[-1]]}),
    (
        400,
        f"row 0 has {MAX_TOKENS + 1} tokens, the teacher takes {MAX_TOKENS}",
        {**JSON, "responses": [[1] * MAX_TOKENS]},
    ),
    (400, "1 prompts, but 2 responses", {**JSON, "responses": [[1], [2]]}),
    (400, "prompts must be lists of token ids", {**JSON, "prompts": [1]}),
    (400, "responses must be lists of token ids", {**JSON, "responses": [[1.5]]}),
    (400, "tempreature is no field of it", {**JSON, "tempreature": 1}),
    (400, "must be an object with teacher, prompts and responses", {"teacher": "a"}),
    (409, "temperature 2 is asked for", {**JSON, "temperature": 2}),
    (400, "temperature is no number", {**JSON, "temperature": True}),
    (400, "teacher is no name", {**JSON, "teacher": ["a"]}),
]


@pytest.mark.parametrize(("status", "said", "asked"), REFUSED)
def test_refuses_with_a_status_and_the_reason(
    served: Scoring, status: int, said: str, asked: bytes | dict[str, Any]
) -> None:
    async def body(http: aiohttp.ClientSession) -> None:
        got, _, reply = await send(http, served.url, asked)
        assert got == status
        assert said in orjson.loads(reply)["error"]
        assert not served.works

    run(body)


def test_a_body_that_is_not_of_its_encoding_is_refused(served: Scoring) -> None:
    async def body(http: aiohttp.ClientSession) -> None:
        status, _, reply = await send(http, served.url, call_of(), Content_Encoding="gzip")
        assert status == 400
        assert "the body cannot be read" in orjson.loads(reply)["error"]

    run(body)


def test_what_teachers_are_there_and_what_was_done_can_be_read(served: Scoring) -> None:
    async def body(http: aiohttp.ClientSession) -> None:
        for teacher in TEACHERS:
            await send(http, served.url, call_of(teacher))
        await send(http, served.url, b"junk")
        async with http.get(f"{served.url}/teachers") as response:
            assert (await response.json())["b"] == {
                **{"fingerprint": "print-b", "vocab_size": VOCAB_SIZE, "max_tokens": MAX_TOKENS, "temperature": 1.0}
            }
        async with http.get(f"{served.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        tokens = len(expected())
        for line in (
            'requests_total{status="200"} 2',
            'requests_total{status="400"} 1',
            f'scored_tokens_total{{teacher="b"}} {tokens}',
            "waiting_tokens 0",
            "batches_total 2",
            "switches_total 2",
            'request_seconds_bucket{le="+Inf"} 3',
            "request_seconds_count 3",
        ):
            assert f"mopd_teacher_service_{line}" in lines
        assert all(line.startswith(("# HELP ", "# TYPE ", "mopd_")) for line in lines)

    run(body)


def test_every_path_but_health_wants_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOPD_KEY", "sesame")
    with scoring(config_of(tmp_path, service={"api_key_env": "MOPD_KEY"})) as served:

        async def without(http: aiohttp.ClientSession) -> None:
            paths = {"/health": 200, "/ready": 401, "/teachers": 401, "/metrics": 401, "/score": 401, "/nowhere": 401}
            for path, status in paths.items():
                async with http.get(f"{served.url}{path}") as response:
                    assert response.status == status, path
            assert (await send(http, served.url, call_of(), Authorization="Bearer sesam"))[0] == 401
            assert (await send(http, served.url, call_of(), Authorization="Bearer sesame"))[0] == 200

        run(without)


def test_no_host_but_this_machine_without_a_key(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"service\.host=0\.0\.0\.0 can be reached .*service\.api_key_env"):
        Front(config_of(tmp_path, service={"host": "0.0.0.0"}), {})


def test_a_port_that_is_taken_is_named(tmp_path: Path, served: Scoring) -> None:
    port = int(served.url.rpartition(":")[2])
    with pytest.raises(UserError, match=rf"service\.port={port}: .*in use.*; set another"):
        Front(config_of(tmp_path, service={"port": port}), {}).start()


def test_a_port_that_the_keeper_has_reserved_is_served_on(tmp_path: Path) -> None:
    with reserve_port("127.0.0.1", "service") as reserved:
        port = reserved.getsockname()[1]
        for _ in range(2):
            with scoring(config_of(tmp_path, service={"port": port})) as served:
                run(lambda http, served=served: _scores(http, served))
                assert served.url == f"http://127.0.0.1:{port}"


async def _scores(http: aiohttp.ClientSession, served: Scoring) -> None:
    assert (await send(http, served.url, call_of()))[0] == 200


def test_a_body_may_not_be_larger_than_a_full_queue(tmp_path: Path) -> None:
    with scoring(config_of(tmp_path, service={"max_waiting_tokens": 10})) as served:

        async def body(http: aiohttp.ClientSession) -> None:
            assert (await send(http, served.url, b"x" * (2 << 20)))[0] == 413
            await _scores(http, served)

        run(body)


def test_a_full_queue_says_when_to_come_again(tmp_path: Path) -> None:
    with scoring(config_of(tmp_path, service={"max_waiting_tokens": 100})) as served:
        served.gate.clear()

        async def body(http: aiohttp.ClientSession) -> None:
            first = asyncio.create_task(send(http, served.url, call_of()))
            await until(lambda: served.works)
            second = asyncio.create_task(send(http, served.url, call_of(seed=1)))
            await asyncio.sleep(0.1)
            status, headers, reply = await send(http, served.url, call_of(count=30))
            assert (status, headers["Retry-After"]) == (429, "1")
            assert "too many tokens wait" in orjson.loads(reply)["error"]
            served.gate.set()
            assert [(await task)[0] for task in (first, second)] == [200, 200]
            assert (await send(http, served.url, call_of(count=30)))[0] == 200

        run(body)


def test_a_repeated_key_joins_the_work_in_flight_and_later_gets_the_kept_reply(served: Scoring) -> None:
    async def body(http: aiohttp.ClientSession) -> None:
        served.gate.clear()
        asked = [asyncio.create_task(send(http, served.url, call_of(), Idempotency_Key="k")) for _ in range(4)]
        await until(lambda: served.works)
        await asyncio.sleep(0.1)
        served.gate.set()
        replies = [await task for task in asked]
        replies.append(await send(http, served.url, call_of(), Idempotency_Key="k"))
        for status, _, reply in replies:
            assert status == 200
            np.testing.assert_array_equal(decode_reply(reply).logprobs, expected())
        assert served.num_rows == 5
        status, _, reply = await send(http, served.url, call_of(seed=1), Idempotency_Key="k")
        assert (status, b"with another body" in reply) == (409, True)
        await send(http, served.url, call_of(), Idempotency_Key="other")
        await send(http, served.url, call_of())
        assert served.num_rows == 15

    run(body)


def test_kept_replies_are_bounded_and_the_oldest_leave_first(served: Scoring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies_module, "KEPT_BYTES", 3 * (replies_module.ENTRY_BYTES + 4 * len(expected())))

    async def body(http: aiohttp.ClientSession) -> None:
        for key in ("0", "1", "2", "3"):
            await send(http, served.url, call_of(), Idempotency_Key=key)
        for key, num_rows in (("3", 20), ("1", 20), ("0", 25)):
            await send(http, served.url, call_of(), Idempotency_Key=key)
            assert served.num_rows == num_rows, key

    run(body)


def test_a_failure_is_not_kept_and_the_service_goes_on(served: Scoring) -> None:
    async def body(http: aiohttp.ClientSession) -> None:
        served.failure = RuntimeError("out of memory")
        status, _, reply = await send(http, served.url, call_of(), Idempotency_Key="k")
        assert (status, orjson.loads(reply)["error"]) == (500, "teacher a cannot be asked: out of memory")
        served.failure = None
        served.answer = lambda teacher, prompt, response: np.full(len(response), np.nan, np.float32)
        status, _, reply = await send(http, served.url, call_of(), Idempotency_Key="k")
        assert (status, orjson.loads(reply)["error"]) == (500, "teacher a gives non-finite log-probs for row 1")
        served.answer = formula
        assert (await send(http, served.url, call_of(), Idempotency_Key="k"))[0] == 200

    run(body)


def test_a_client_that_hangs_up_takes_its_waiting_rows_along(served: Scoring) -> None:
    async def body(http: aiohttp.ClientSession) -> None:
        served.gate.clear()
        begun = asyncio.create_task(send(http, served.url, call_of(), Idempotency_Key="begun"))
        await until(lambda: served.works)
        leaver = asyncio.create_task(send(http, served.url, call_of(seed=1), Idempotency_Key="leaver"))
        joined = [asyncio.create_task(send(http, served.url, call_of(seed=2), Idempotency_Key="j")) for _ in range(2)]
        queue = served.front._queue
        waiting = 2 * queue.waiting_tokens
        await until(lambda: queue.waiting_tokens > waiting)
        await asyncio.sleep(0.1)
        waiting = queue.waiting_tokens
        for task in (begun, leaver, joined[0]):
            task.cancel()
        await until(lambda: queue.waiting_tokens < waiting)
        served.gate.set()
        assert (await joined[1])[0] == 200
        assert served.num_rows == 10
        assert (await send(http, served.url, call_of(), Idempotency_Key="begun"))[0] == 200
        assert served.num_rows == 10  # what had begun was finished and kept

    run(body)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_end_it_finishes_what_is_queued_and_takes_nothing_new(served: Scoring, number: int) -> None:
    async def body(http: aiohttp.ClientSession) -> None:
        served.gate.clear()
        asked = [asyncio.create_task(send(http, served.url, call_of(t), Idempotency_Key=t)) for t in TEACHERS]
        await until(lambda: served.works)
        assert await ready(http, served.url)
        await asyncio.sleep(0.1)
        os.kill(os.getpid(), number)
        async with asyncio.timeout(5):
            while await ready(http, served.url):
                await asyncio.sleep(0.01)
        status, headers, _ = await send(http, served.url, call_of(seed=3))
        assert (status, headers["Retry-After"]) == (503, "1")
        assert not served.ended(0.05)
        served.gate.set()
        assert [(await task)[0] for task in asked] == [200, 200]
        assert await asyncio.to_thread(served.ended, 5.0)
        assert (await send(http, served.url, call_of(), Idempotency_Key="a"))[0] == 200  # kept

    run(body)


def test_asked_to_end_it_ends_where_nobody_reads_what_it_says(served: Scoring, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as nobody, monkeypatch.context() as patched:
        patched.setattr("sys.stderr", nobody)
        os.kill(os.getpid(), signal.SIGTERM)
        assert served.ended(within_s=5)
        with suppress(BrokenPipeError):
            nobody.close()
