"""The rollout engine on one real server, beyond the contract: abort, pause, updates, bad input."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract.test_engine import GREEDY, generate, prompts, reference, reference_logprobs, requests, run
from running import Server
from tiny import VOCAB_SIZE

from megatron_mopd.client import Client
from megatron_mopd.config import Config, Quantization
from megatron_mopd.embedded.engine import EmbeddedEngine
from megatron_mopd.errors import UserError
from megatron_mopd.protocols import EndpointDown, SampleRequest
from megatron_mopd.sglang.engine import SGLangEngine, student_engine
from megatron_mopd.sglang.generation import Generation
from megatron_mopd.sglang.placement import INITIAL_VERSION
from megatron_mopd.sglang.served_weights import ServedWeights
from megatron_mopd.sglang.weights import load_folder, read_version, trained_name, version_name
from megatron_mopd.types import Segment

pytestmark = pytest.mark.sglang

MakeEngine = Callable[..., SGLangEngine]
LONG = 250


@pytest.fixture
def make_engine(student: Server) -> MakeEngine:
    def make(**options: Any) -> SGLangEngine:
        return SGLangEngine([student.url], student.checkpoint, student.config.sglang, run="rollouts", **options)

    return make


@pytest.fixture(scope="module", autouse=True)
def leave_the_server_as_it_was(student: Server) -> Iterator[None]:
    yield

    async def reload() -> None:
        async with Client(silence_s=60.0) as client:
            await load_folder(client, student.url, student.checkpoint, INITIAL_VERSION)

    asyncio.run(reload())


def long_requests(count: int = 4) -> list[SampleRequest]:
    return [SampleRequest(f"long-{i}", ids, LONG, ()) for i, ids in enumerate(prompts(count, shortest=3))]


async def started(engine: SGLangEngine, asked: list[SampleRequest]) -> list[asyncio.Task[Segment]]:
    """On their way, and each has some tokens."""
    tasks = [asyncio.create_task(engine.generate(request)) for request in asked]
    await until(lambda: len(engine._runs) == len(asked) and all(len(r.log.token_ids) > 1 for r in engine._runs))
    return tasks


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def received(engine: SGLangEngine) -> dict[str, tuple[tuple[int, ...], tuple[float, ...]]]:
    return {r.request.trajectory_id: (tuple(r.log.token_ids), tuple(r.log.logprobs)) for r in engine._runs}


def assert_sampled_from(folder: Path, request: SampleRequest, segment: Segment, atol: float = 1e-5) -> None:
    want = reference_logprobs(folder, request.token_ids + segment.token_ids, 1.0)[len(request.token_ids) - 1 :]
    np.testing.assert_allclose(segment.logprobs, want, atol=atol)


def test_greedy_equals_the_embedded_engine(make_engine: MakeEngine, student: Server) -> None:
    asked = requests(8, tokens=24)
    embedded = generate(EmbeddedEngine(student.checkpoint, seed=0, top_p=GREEDY["top_p"]), asked)
    for want, got in zip(embedded, generate(make_engine(**GREEDY), asked), strict=True):
        assert got.token_ids == want.token_ids
        np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)


def test_many_callers_at_once_are_served_in_bounds(make_engine: MakeEngine, student: Server) -> None:
    tight = student.config.sglang.model_copy(update={"max_requests": 16})
    engine = SGLangEngine([student.url], student.checkpoint, tight, run="rollouts")
    asked = [SampleRequest(f"{i}", ids, 1 + i % 3, ()) for i, ids in enumerate(prompts(200))]
    assert [len(s.token_ids) for s in generate(engine, asked)] == [r.max_new_tokens for r in asked]


def test_abort_returns_what_there_is(make_engine: MakeEngine, student: Server) -> None:
    asked = long_requests()

    async def work(engine: SGLangEngine) -> list[Segment]:
        tasks = await started(engine, asked)
        await engine.abort("long-1")
        assert tasks[1].done() or await asyncio.wait_for(tasks[1], 1)
        await engine.abort("never heard of")
        return await asyncio.gather(*tasks)

    segments = run(make_engine(), work)
    assert [s.finish_reason for s in segments] == ["length", "abort", "length", "length"]
    assert 1 < len(segments[1].token_ids) < LONG
    for request, segment in zip(asked, segments, strict=True):
        assert_sampled_from(student.checkpoint, request, segment)


def test_abort_of_what_has_not_begun_returns_nothing(student: Server) -> None:
    one_at_a_time = student.config.sglang.model_copy(update={"max_requests": 1})
    engine = SGLangEngine([student.url], student.checkpoint, one_at_a_time, run="rollouts")

    async def work(engine: SGLangEngine) -> None:
        first = asyncio.create_task(engine.generate(long_requests()[0]))
        await until(lambda: any(r.log.token_ids for r in engine._runs))
        second = asyncio.create_task(engine.generate(SampleRequest("waits", (1, 2), 4, ())))
        await asyncio.sleep(0)
        await engine.abort("waits")
        assert (await second).token_ids == ()
        assert (await second).finish_reason == "abort"
        await engine.abort("long-0")
        assert len((await first).token_ids) > 0

    run(engine, work)


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_a_pause_changes_no_token_and_loses_none(make_engine: MakeEngine, student: Server, mode: Any) -> None:
    asked = long_requests()

    async def work(engine: SGLangEngine) -> list[Segment]:
        tasks = await started(engine, asked)
        await engine.pause(mode)
        late = asyncio.create_task(engine.generate(SampleRequest("late", (1, 2), 3, ())))
        await asyncio.sleep(0.2)  # what was on its way to us
        before = received(engine)
        await asyncio.sleep(0.5)
        assert received(engine) == before
        assert flush_cache(student.url) == (mode != "in_place")  # refused while a request holds key-value cache
        assert [t.done() for t in tasks] == [mode == "abort"] * len(asked)
        assert not late.done()
        await engine.resume()
        segments = await asyncio.gather(*tasks)
        assert len((await late).token_ids) == 3
        for request, segment in zip(asked, segments, strict=True):
            ids, logprobs = before.get(request.trajectory_id, ((), ()))
            assert (segment.token_ids[: len(ids)], segment.logprobs[: len(ids)]) == (ids, logprobs)
        assert await used_tokens(student.url) == 0
        return segments

    segments = run(make_engine(), work)
    assert {s.finish_reason for s in segments} == {"abort" if mode == "abort" else "length"}
    for request, segment in zip(asked, segments, strict=True):
        assert len(segment.token_ids) > 1
        assert_sampled_from(student.checkpoint, request, segment)


@pytest.mark.parametrize("retain_kv", [False, True], ids=["recomputed", "kept"])
def test_interruptions_leave_no_key_value_cache_behind(
    make_engine: MakeEngine, student: Server, retain_kv: bool
) -> None:
    """Fault 13: what is free at the end is what was free at the beginning, once what is kept for later is dropped."""
    asked = long_requests()

    async def work(engine: SGLangEngine) -> None:
        for i in range(5):
            tasks = await started(engine, [replace(r, trajectory_id=f"{r.trajectory_id}/{i}") for r in asked])
            await engine.interrupt()
            segments = await asyncio.gather(*tasks)
            assert {s.finish_reason for s in segments} == {"abort"}
            assert await used_tokens(student.url) == 0

    flush_cache(student.url)
    before = asyncio.run(free_tokens(student.url))
    run(make_engine(retain_kv=retain_kv), work)
    assert flush_cache(student.url)
    assert asyncio.run(free_tokens(student.url)) == before


async def free_tokens(url: str) -> int:
    async with Client(silence_s=30.0) as client:
        load = (await client.get(url, "/v1/loads"))["loads"][0]
        return load["max_total_num_tokens"] - load["num_used_tokens"]


def flush_cache(url: str) -> bool:
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/flush_cache", method="POST"), timeout=30) as reply:
            return reply.status == 200
    except urllib.error.HTTPError:
        return False


async def used_tokens(url: str) -> int:
    """Of the key-value cache, by requests that live; the server publishes it from time to time."""
    async with Client(silence_s=30.0) as client:
        for _ in range(100):
            used = (await client.get(url, "/v1/loads"))["loads"][0]["num_used_tokens"]
            if not used:
                break
            await asyncio.sleep(0.1)
        return used


def test_close_leaves_the_server_to_others(make_engine: MakeEngine, student: Server) -> None:
    async def work(engine: SGLangEngine) -> None:
        tasks = await started(engine, long_requests())
        await engine.pause("in_place")
        await engine.close()
        assert all(isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*tasks, return_exceptions=True))

    run(make_engine(), work)
    assert len(generate(make_engine(), requests(3))) == 3
    assert asyncio.run(used_tokens(student.url)) == 0


def test_an_update_cuts_what_is_in_flight_and_forgets_what_old_weights_computed(
    make_engine: MakeEngine, student: Server, checkpoints: list[Path]
) -> None:
    asked = long_requests()
    other = checkpoints[1]

    async def work(engine: SGLangEngine) -> tuple[list[Segment], list[Segment]]:
        tasks = await started(engine, asked)
        have = received(engine)
        await engine.update_weights(other, 1)
        cut = await asyncio.gather(*tasks)
        for request, segment in zip(asked, cut, strict=True):
            ids, logprobs = have[request.trajectory_id]
            assert (segment.token_ids[: len(ids)], segment.logprobs[: len(ids)]) == (ids, logprobs)
        onward = [
            SampleRequest(r.trajectory_id, r.token_ids + s.token_ids, 20, ()) for r, s in zip(asked, cut, strict=True)
        ]
        after = await asyncio.gather(*[engine.generate(r) for r in onward])
        for request, segment in zip(onward, after, strict=True):
            assert_sampled_from(other, request, segment)
        return cut, after

    cut, after = run(make_engine(), work)
    assert {(s.finish_reason, s.weight_version) for s in cut} == {("abort", 0)}
    assert {s.weight_version for s in after} == {1}
    for request, segment in zip(asked, cut, strict=True):
        assert_sampled_from(student.checkpoint, request, segment)


def test_after_a_failed_update_nothing_is_sampled_until_one_succeeds(
    make_engine: MakeEngine, student: Server, checkpoints: list[Path], tmp_path: Path
) -> None:
    asked = requests(2)

    async def work(engine: SGLangEngine) -> Segment:
        await engine.generate(asked[0])
        with pytest.raises(UserError, match="weights"):
            await engine.update_weights(tmp_path / "nothing here", 1)
        with pytest.raises(UserError, match=r"^0@0: the student servers could not be given version 1 of the weights"):
            await engine.generate(asked[0])
        await engine.update_weights(checkpoints[1], 1)
        return await engine.generate(asked[1])

    segment = run(make_engine(), work)
    assert segment.weight_version == 1
    assert_sampled_from(checkpoints[1], asked[1], segment)


def test_weights_that_somebody_else_loads_sample_nothing(
    make_engine: MakeEngine, student: Server, checkpoints: list[Path]
) -> None:
    asked = requests(12, tokens=40)

    async def work(engine: SGLangEngine) -> list[Segment]:
        await engine.generate(asked[0])
        async with Client(silence_s=60.0) as client:
            await load_folder(client, student.url, checkpoints[2], "of-another-run")
        return await asyncio.gather(*[engine.generate(r) for r in asked])

    for request, segment in zip(asked, run(make_engine(), work), strict=True):
        assert_sampled_from(student.checkpoint, request, segment)


def test_weights_that_the_trainer_sent_are_only_checked(make_engine: MakeEngine, student: Server) -> None:
    async def work(engine: SGLangEngine) -> Segment:
        async with Client(silence_s=60.0) as client:
            await load_folder(
                client, student.url, student.checkpoint, version_name("rollouts", 5)
            )  # stands for a broadcast
        await engine.update_weights(None, 5)
        segment = await engine.generate(requests(1)[0])
        with pytest.raises(UserError, match=r"no student server serves 'rollouts.*6'"):
            await engine.update_weights(None, 6)
        with pytest.raises(UserError, match="could not be given version 6"):
            await engine.generate(requests(1)[0])
        await engine.update_weights(student.checkpoint, 6)
        return segment

    assert run(make_engine(), work).weight_version == 5


@pytest.mark.parametrize("quantization", [{}, {"experts": "mxfp4"}], ids=["plain", "mxfp4"])
def test_the_checkpoint_is_not_taken_for_weights_that_were_trained(
    quantization: dict[str, str], student: Server
) -> None:
    """A gate has sampled the student's checkpoint, and the server is kept: it has not got step 0 of the trainer, nor is
    step 0 by one rule that by another."""
    tree: dict[str, Any] = student.config.model_dump() | {"quantization": quantization}
    tree["sglang"]["student"] |= {"urls": [student.url]}
    config = Config.model_validate(tree)
    other = config.model_copy(update={"quantization": Quantization(experts="mxfp4", rule="rceil")})

    async def work(engine: SGLangEngine) -> None:
        await engine.generate(requests(1)[0])
        async with Client(silence_s=60.0) as client:
            gate = await read_version(client, student.url)
            for trained, name in ((config, gate), (other, version_name(trained_name(config), 0))):
                await load_folder(client, student.url, student.checkpoint, name)
                weights = ServedWeights(client, trained_name(trained), False, None)
                async with weights.update(None, 0):
                    with pytest.raises(EndpointDown, match="has not got"):
                        await weights.load(student.url)

    run(student_engine(config, None), work)


def test_routes_are_those_of_the_reference_model_over_all_segments(make_engine: MakeEngine, student: Server) -> None:
    async def work(engine: SGLangEngine) -> tuple[tuple[int, ...], list[np.ndarray]]:
        ids, routed, parts = tuple(range(20, 30)), 0, []
        for budget in (5, 1, 40):
            segment = await engine.generate(SampleRequest("r", ids, budget, (), routed))
            assert segment.routed_experts is not None
            parts.append(segment.routed_experts)
            routed += len(segment.routed_experts)
            assert routed == len(ids) + len(segment.token_ids) - 1
            ids += (*segment.token_ids, 3, 4)  # an observation
        return ids, parts

    ids, parts = run(make_engine(router_replay=True), work)
    with torch.no_grad():
        logits = reference(student.checkpoint)(torch.tensor([ids]), output_router_logits=True).router_logits
    want_LTK = torch.stack([layer.topk(2).indices for layer in logits]).sort().values
    got_TLK = np.sort(np.concatenate(parts).astype(np.int64))
    np.testing.assert_array_equal(got_TLK.transpose(1, 0, 2), want_LTK[:, : len(got_TLK)])


def test_bad_requests_are_one_line_and_harm_nobody(make_engine: MakeEngine) -> None:
    bad = {
        "too long": (
            SampleRequest("long", (1, 2), 20_000, ()),
            r"^long: 2 \+ 20000 tokens .* lower rollout.max_resp",
        ),
        "no token": (SampleRequest("odd", (1, VOCAB_SIZE), 4, ()), rf"^odd: {VOCAB_SIZE} is no token of the student"),
        "negative": (SampleRequest("neg", (-1, 3), 4, ()), r"^neg: -1 is no token of the student"),
    }

    async def work(engine: SGLangEngine) -> None:
        for request, message in bad.values():
            with pytest.raises(UserError, match=message):
                await engine.generate(request)
            assert len((await engine.generate(requests(1)[0])).token_ids) == 12

    run(make_engine(), work)


@pytest.mark.parametrize("temperature", [0.5, 1.3])
def test_a_server_whose_logprobs_ignore_the_temperature_is_refused(student: Server, temperature: float) -> None:
    """As one does with SGLANG_RETURN_ORIGINAL_LOGPROB in its environment: here, it is never told the temperature."""

    class AtOne(Client):
        async def post(self, url: str, path: str, body: Any, silence_s: float | None = None) -> Any:
            return await super().post(
                url, path, body | {"sampling_params": body["sampling_params"] | {"temperature": 1.0}}, silence_s
            )

    async def check(client_type: type[Client]) -> None:
        async with client_type(silence_s=60.0) as client:
            await Generation(client, temperature, top_p=0.9).check_temperature(student.url)

    asyncio.run(check(Client))
    with pytest.raises(UserError, match=f"server {student.url} returns log-probs that ignore the temperature"):
        asyncio.run(check(AtOne))


def test_a_server_that_is_not_ours_is_refused_at_start(student: Server, checkpoints: list[Path]) -> None:
    brief = student.config.sglang.model_copy(update={"start_timeout_s": 1.0})

    async def start(url: str) -> None:
        engine = SGLangEngine([url], student.checkpoint, brief, run="rollouts")
        try:
            await engine.start()
        finally:
            await engine.close()

    for url, message in (("http://127.0.0.1:9", "is not ready after 1 s .*cannot connect"), ("what", "is not a URL")):
        with pytest.raises(UserError, match=message):
            asyncio.run(start(url))
