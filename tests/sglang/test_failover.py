"""Two student servers that are killed in the middle: no trajectory is lost, and no token that was received changes.

Their model has end ids of its own, which end no response.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from contract.test_engine import prompts, reference_logprobs, run
from running import Servers, StartServers
from tiny import write_checkpoint

from megatron_mopd.protocols import SampleRequest
from megatron_mopd.sglang.engine import SGLangEngine, student_engine
from megatron_mopd.types import Segment

pytestmark = pytest.mark.sglang

LONG = 300
END_IDS = list(range(0, 250, 10))
Received = dict[str, tuple[tuple[int, ...], tuple[float, ...]]]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of the checkpoint that the servers begin with, and of an update."""
    folders = [tmp_path_factory.mktemp("weights") / name for name in ("initial", "update")]
    for seed, folder in enumerate(folders):
        write_checkpoint(folder, seed=20 + seed, mlp_only_layers=[], eos_token_id=END_IDS)
    return folders


@pytest.fixture(scope="module")
def pair(
    start_servers: StartServers, weights: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("pair") / "run"
    options = {"student": {"checkpoint": str(weights[0])}, "rollout": {"router_replay": True}}
    with start_servers(folder, students=2, **options) as servers:
        yield servers


async def kill_in_the_middle(
    engine: SGLangEngine, asked: Sequence[SampleRequest], pair: Servers, name: str
) -> tuple[Received, list[Segment]]:
    """What had been received when the server died, and what became of it."""
    tasks = [asyncio.create_task(engine.generate(request)) for request in asked]
    async with asyncio.timeout(120):
        while len(engine._runs) < len(asked) or min(len(r.log.token_ids) for r in engine._runs) < 40:
            await asyncio.sleep(0.01)
    pair.kill(name)
    received = {r.request.trajectory_id: (tuple(r.log.token_ids), tuple(r.log.logprobs)) for r in engine._runs}
    assert len(received) == len(asked)
    return received, await asyncio.gather(*tasks)


def assert_whole(folder: Path, asked: Sequence[SampleRequest], received: Received, segments: list[Segment]) -> None:
    """All tokens, those received before the server died unchanged, all from the weights in `folder`."""
    for request, segment in zip(asked, segments, strict=True):
        assert (len(segment.token_ids), segment.finish_reason) == (LONG, "length")
        ids, logprobs = received[request.trajectory_id]
        assert (segment.token_ids[: len(ids)], segment.logprobs[: len(ids)]) == (ids, logprobs)
        want = reference_logprobs(folder, request.token_ids + segment.token_ids, 1.0)[len(request.token_ids) - 1 :]
        np.testing.assert_allclose(segment.logprobs, want, atol=1e-4)
        assert segment.routed_experts is not None
        assert len(segment.routed_experts) == len(request.token_ids) + LONG - 1


def long_requests(suffix: str) -> list[SampleRequest]:
    return [SampleRequest(f"{i}@{suffix}", ids, LONG, ()) for i, ids in enumerate(prompts(12, shortest=3))]


def test_the_models_own_end_ids_end_no_response(pair: Servers, weights: list[Path]) -> None:
    """Under `ignore_eos` the stop ids of the request would be ignored with them."""
    asked = [SampleRequest(f"{i}", ids, 100, (7, 11)) for i, ids in enumerate(prompts(16))]

    async def work(engine: SGLangEngine) -> list[Segment]:
        return await asyncio.gather(*[engine.generate(r) for r in asked])

    segments = run(student_engine(pair.config, None), work)
    assert {s.finish_reason for s in segments} == {"stop", "length"}
    assert sum(len(set(s.token_ids) & set(END_IDS)) > 0 for s in segments) > 8
    for request, segment in zip(asked, segments, strict=True):
        stops = [token in (7, 11) for token in segment.token_ids]
        assert sum(stops) == stops[-1] == (segment.finish_reason == "stop")
        assert stops[-1] or len(stops) == 100
        want = reference_logprobs(weights[0], request.token_ids + segment.token_ids, 1.0)
        np.testing.assert_allclose(segment.logprobs, want[len(request.token_ids) - 1 :], atol=1e-5)


def test_one_of_two_dies_and_gets_work_again(pair: Servers, weights: list[Path]) -> None:
    asked = long_requests("one")
    url = pair.urls["student-0"]

    async def work(engine: SGLangEngine) -> None:
        received, segments = await kill_in_the_middle(engine, asked, pair, "student-0")
        assert_whole(weights[0], asked, received, segments)
        start = time.monotonic()
        while url not in engine._fleet.urls:
            assert time.monotonic() - start < 300
            await asyncio.sleep(0.2)
        again = [asyncio.create_task(engine.generate(request)) for request in long_requests("again")]
        async with asyncio.timeout(60):
            while {run.url for run in engine._runs} != set(pair.urls.values()):
                await asyncio.sleep(0.01)
        await asyncio.gather(*again)

    run(student_engine(pair.config, None), work)


def test_a_lone_server_that_comes_back_with_its_first_weights_samples_none_of_them(
    pair: Servers, weights: list[Path]
) -> None:
    asked = long_requests("lone")
    urls, settings = [pair.urls["student-1"]], pair.config.sglang

    async def work(engine: SGLangEngine) -> tuple[Received, list[Segment]]:
        await engine.update_weights(weights[1], 1)
        return await kill_in_the_middle(engine, asked, pair, "student-1")

    received, segments = run(SGLangEngine(urls, weights[0], settings, run="lone", router_replay=True), work)
    assert {s.weight_version for s in segments} == {1}
    assert_whole(weights[1], asked, received, segments)
