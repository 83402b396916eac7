"""What every rollout engine promises (protocols.RolloutEngine): the embedded one here, SGLang's in tests/sglang.

Where a test compares two samplings, it decodes greedily: only the embedded engine can promise to sample the same tokens
again (test_embedded_engine.py).
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from tiny import VOCAB_SIZE
from transformers import AutoModelForCausalLM

from megatron_mopd.protocols import RolloutEngine, SampleRequest
from megatron_mopd.types import Segment

Engine = TypeVar("Engine", bound=RolloutEngine)
MakeEngine = Callable[..., RolloutEngine]
GREEDY = {"top_p": 1e-9}


def run(engine: Engine, work: Callable[[Engine], Awaitable[Any]]) -> Any:
    async def body() -> Any:
        try:
            await engine.start()
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(body())


def generate(engine: RolloutEngine, requests: Sequence[SampleRequest]) -> list[Segment]:
    return run(engine, lambda e: asyncio.gather(*[e.generate(r) for r in requests]))


def prompts(count: int, shortest: int = 1) -> list[tuple[int, ...]]:
    """Of lengths 1, 2, ..., 9, 1, ...: padding on the left in every batch; the last vocabulary id among them."""
    rng = np.random.default_rng(5)
    rows = [(*rng.integers(0, VOCAB_SIZE, shortest + i % 9 - 1).tolist(), VOCAB_SIZE - 1) for i in range(count)]
    return [tuple(row) for row in rows]


def requests(count: int, tokens: int = 12, stop: tuple[int, ...] = ()) -> list[SampleRequest]:
    return [SampleRequest(f"{i}@0", ids, tokens, stop) for i, ids in enumerate(prompts(count))]


@lru_cache(maxsize=8)
def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)


@torch.no_grad()
def reference_logprobs(folder: Path, token_ids: Sequence[int], temperature: float) -> np.ndarray:
    """log softmax(z / T) of every token but the first, by transformers, one row at a time."""
    logits_TV = reference(folder)(input_ids=torch.tensor([token_ids])).logits[0, :-1].float() / temperature
    return logits_TV.log_softmax(-1).gather(-1, torch.tensor(token_ids)[1:, None])[:, 0].numpy()


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.0, 0.6)])
def test_logprobs_are_those_of_the_whole_tempered_distribution(
    make_engine: MakeEngine, checkpoint: Path, temperature: float, top_p: float
) -> None:
    asked = requests(11)
    segments = generate(make_engine(temperature=temperature, top_p=top_p), asked)
    for request, segment in zip(asked, segments, strict=True):
        want = reference_logprobs(checkpoint, request.token_ids + segment.token_ids, temperature)
        np.testing.assert_allclose(segment.logprobs, want[len(request.token_ids) - 1 :], atol=1e-5)


def test_greedy_tokens_are_the_most_likely_ones(make_engine: MakeEngine, checkpoint: Path) -> None:
    asked = requests(5, tokens=6)
    model = reference(checkpoint)
    for request, segment in zip(asked, generate(make_engine(**GREEDY), asked), strict=True):
        ids = list(request.token_ids)
        for _ in range(6):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        assert segment.token_ids == tuple(ids[len(request.token_ids) :])


def test_top_p_draws_from_the_smallest_set_that_holds_p(make_engine: MakeEngine, checkpoint: Path) -> None:
    asked = [SampleRequest(f"{i}", (3, 4), 1, ()) for i in range(400)]
    drawn = {s.token_ids[0] for s in generate(make_engine(top_p=0.2), asked)}
    model = reference(checkpoint)
    probs, order = model(input_ids=torch.tensor([[3, 4]])).logits[0, -1].softmax(-1).sort(descending=True)
    nucleus = set(order[: int((probs.cumsum(0) < 0.2).sum()) + 1].tolist())
    assert drawn <= nucleus
    assert len(drawn) > 1


def test_a_stop_id_ends_the_segment_and_stays_in_it(make_engine: MakeEngine) -> None:
    free = generate(make_engine(**GREEDY), requests(20, tokens=16))
    stop = (free[0].token_ids[2], free[1].token_ids[5])
    segments = generate(make_engine(**GREEDY), requests(20, tokens=16, stop=stop))
    assert {s.finish_reason for s in segments} == {"stop", "length"}
    for whole, segment in zip(free, segments, strict=True):
        hits = [i for i, token in enumerate(whole.token_ids) if token in stop]
        end = hits[0] + 1 if hits else 16
        assert segment.token_ids == whole.token_ids[:end]
        assert segment.finish_reason == ("stop" if hits else "length")
        assert segment.loss_mask == (True,) * end


def test_rows_end_on_their_own_budgets(make_engine: MakeEngine) -> None:
    asked = [SampleRequest(f"{i}", ids, 1 + i % 7, ()) for i, ids in enumerate(prompts(30))]
    assert [len(s.token_ids) for s in generate(make_engine(), asked)] == [r.max_new_tokens for r in asked]


def test_a_long_response_outgrows_the_first_cache(make_engine: MakeEngine, checkpoint: Path) -> None:
    (segment,) = generate(make_engine(), [SampleRequest("long", (5, 6), 90, ())])
    want = reference_logprobs(checkpoint, (5, 6, *segment.token_ids), 1.0)
    np.testing.assert_allclose(segment.logprobs, want[1:], atol=1e-5)


async def in_pieces(engine: RolloutEngine, request: SampleRequest, piece: int, pause: bool) -> Segment:
    """The request, interrupted every `piece` tokens."""
    parts: list[Segment] = []
    token_ids, left = request.token_ids, request.max_new_tokens
    while left:
        part = await engine.generate(SampleRequest(request.trajectory_id, token_ids, min(piece, left), ()))
        parts.append(part)
        token_ids, left = token_ids + part.token_ids, left - len(part.token_ids)
        if pause:
            await asyncio.sleep(0.002)
    ids, logprobs = sum((p.token_ids for p in parts), ()), sum((p.logprobs for p in parts), ())
    return Segment(ids, logprobs, (True,) * len(ids), 0)


def assert_interruptions_change_nothing(make_engine: MakeEngine, options: dict[str, float], pause: bool) -> None:
    """Law 5: N interruptions at any points, past kept or computed again, equal none."""
    asked = requests(9)

    async def work(engine: RolloutEngine) -> list[Segment]:
        return await asyncio.gather(*[in_pieces(engine, r, 1 + i % 5, pause) for i, r in enumerate(asked)])

    for whole, pieces in zip(generate(make_engine(**options), asked), run(make_engine(**options), work), strict=True):
        assert whole.token_ids == pieces.token_ids
        np.testing.assert_allclose(whole.logprobs, pieces.logprobs, atol=1e-5)


@pytest.mark.parametrize("pause", [False, True], ids=["in place", "prefilled again"])
def test_interrupting_and_resuming_leaves_the_same_token_log(make_engine: MakeEngine, pause: bool) -> None:
    assert_interruptions_change_nothing(make_engine, GREEDY, pause)


async def interrupted_often(
    engine: RolloutEngine, asked: Sequence[SampleRequest], times: int, update: Path | None = None
) -> list[list[Segment]]:
    """Everything is interrupted so many times, at tokens that chance picks, and each time goes on from its log; a new
    request joins. With `update` there are new weights each time."""
    rng, logs = np.random.default_rng(times), [[] for _ in asked]
    start = time.monotonic()
    await engine.generate(SampleRequest("pilot", (3, 4), asked[0].max_new_tokens // 4, ()))
    spell_s = 4 * (time.monotonic() - start) / times

    async def go_on(log: list[Segment], request: SampleRequest) -> None:
        ids, have = sum((s.token_ids for s in log), ()), sum(len(s.token_ids) for s in log)
        if have < request.max_new_tokens:
            begun_at = log[0].weight_version if log else None
            more = SampleRequest(
                request.trajectory_id, request.token_ids + ids, request.max_new_tokens - have, (), begun_at=begun_at
            )
            segment = await engine.generate(more)
            log += [segment] if segment.token_ids else []

    for i in range(times):
        tasks = [asyncio.create_task(go_on(log, request)) for log, request in zip(logs, asked, strict=True)]
        new = asyncio.create_task(engine.generate(SampleRequest(f"new-{i}", (3,) * (5 + 9 * i), 200, ())))
        await asyncio.sleep(rng.uniform(0.3, 0.9) * spell_s)
        await engine.interrupt()
        await asyncio.gather(*tasks)
        assert (await new).finish_reason == "abort"
        if update is not None:
            await engine.update_weights(update, engine.weight_version + 1)
    await asyncio.gather(*[go_on(log, request) for log, request in zip(logs, asked, strict=True)])
    return logs


def assert_logs_equal(wholes: Sequence[Segment], logs: Sequence[Sequence[Segment]], times: int) -> None:
    for whole, log in zip(wholes, logs, strict=True):
        assert sum((s.token_ids for s in log), ()) == whole.token_ids
        np.testing.assert_allclose(sum((s.logprobs for s in log), ()), whole.logprobs, atol=1e-4)
        assert sum((s.loss_mask for s in log), ()) == (True,) * len(whole.token_ids)
        assert [s.finish_reason for s in log] == ["abort"] * (len(log) - 1) + ["length"]
        assert {s.weight_version for s in log} == {0}
    assert max(map(len, logs)) > 1 + times // 2


@pytest.mark.parametrize("retain_kv", [False, True], ids=["recomputed", "kept"])
@pytest.mark.parametrize("times", [1, 3, 10])
def test_interrupting_everything_leaves_the_same_greedy_token_log(
    make_engine: MakeEngine, times: int, retain_kv: bool
) -> None:
    """Law 5."""
    asked = requests(9, tokens=200)
    wholes = generate(make_engine(**GREEDY), asked)
    logs = run(make_engine(**GREEDY, retain_kv=retain_kv), lambda e: interrupted_often(e, asked, times))
    assert_logs_equal(wholes, logs, times)


@pytest.mark.parametrize("retain_kv", [False, True], ids=["recomputed", "kept"])
def test_kv_of_older_weights_is_used_where_it_is_kept_alone_and_then_marked(
    make_engine: MakeEngine, update: Path, retain_kv: bool
) -> None:
    asked = requests(5, tokens=200)

    async def work(engine: RolloutEngine) -> list[list[Segment]]:
        logs = await interrupted_often(engine, asked, 2, update)
        kv = engine.kv
        assert (kv.retained > 0) == (kv.reused > 0) == retain_kv
        # what is new has a prefix in common with everything that is old
        fresh = SampleRequest("fresh", asked[0].token_ids + logs[0][0].token_ids, 8, ())
        return [*logs, [await engine.generate(fresh)]]

    *logs, (fresh,) = run(make_engine(retain_kv=retain_kv), work)
    marks = {(s.weight_version, s.kv_version) for log in logs for s in log}
    assert {version for version, _ in marks} == {0, 1, 2}
    assert marks == ({(0, None), (1, 0), (2, 0)} if retain_kv else {(0, None), (1, None), (2, None)})
    assert fresh.kv_version is None
    ids = asked[0].token_ids + logs[0][0].token_ids + fresh.token_ids
    np.testing.assert_allclose(fresh.logprobs, reference_logprobs(update, ids, 1.0)[-8:], atol=1e-4)
    for request, log in zip(asked, logs, strict=True):
        ids = request.token_ids + sum((s.token_ids for s in log), ())
        want = reference_logprobs(update, ids, 1.0)[-len(log[-1].token_ids) :]
        off = np.abs(np.array(log[-1].logprobs) - want).max()
        assert off > 1e-3 if retain_kv else off < 1e-4


def test_an_interruption_of_nothing_is_none(make_engine: MakeEngine) -> None:
    async def work(engine: RolloutEngine) -> Segment:
        await engine.interrupt()
        segment = await engine.generate(requests(1)[0])
        await engine.interrupt()
        return segment

    assert run(make_engine(), work).finish_reason == "length"


@pytest.mark.parametrize("observed", [1, 3, 20], ids=["one token", "three", "more than is fed in place"])
def test_observations_enter_the_context(make_engine: MakeEngine, checkpoint: Path, observed: int) -> None:
    async def converse(engine: RolloutEngine, request: SampleRequest) -> tuple[list[int], list[float]]:
        ids, logprobs = list(request.token_ids), []
        for turn in range(3):
            segment = await engine.generate(SampleRequest(request.trajectory_id, tuple(ids), 2 + turn, ()))
            ids += [*segment.token_ids, *range(10, 10 + observed)]
            logprobs += [*segment.logprobs, *[0.0] * observed]
        return ids, logprobs

    asked = requests(7)
    got = run(make_engine(), lambda e: asyncio.gather(*[converse(e, r) for r in asked]))
    for request, (ids, logprobs) in zip(asked, got, strict=True):
        want = reference_logprobs(checkpoint, ids, 1.0)[len(request.token_ids) - 1 :]
        sampled = np.array(logprobs) != 0.0
        np.testing.assert_allclose(np.array(logprobs)[sampled], want[sampled], atol=1e-5)


def test_update_changes_outputs_and_stamps_its_version(make_engine: MakeEngine, update: Path) -> None:
    asked = requests(4)

    async def work(engine: RolloutEngine) -> tuple[list[Segment], list[Segment]]:
        before = await asyncio.gather(*[engine.generate(r) for r in asked])
        await engine.update_weights(update, 7)
        assert engine.weight_version == 7
        return before, await asyncio.gather(*[engine.generate(r) for r in asked])

    before, after = run(make_engine(), work)
    assert {s.weight_version for s in before} == {0}
    assert {s.weight_version for s in after} == {7}
    for request, segment in zip(asked, after, strict=True):
        want = reference_logprobs(update, request.token_ids + segment.token_ids, 1.0)
        np.testing.assert_allclose(segment.logprobs, want[len(request.token_ids) - 1 :], atol=1e-5)


def test_an_update_under_way_never_mixes_versions_in_a_segment(
    make_engine: MakeEngine, checkpoint: Path, update: Path
) -> None:
    async def work(engine: RolloutEngine) -> Segment:
        running = asyncio.create_task(engine.generate(SampleRequest("a", (5,), 60, ())))
        await asyncio.sleep(0.02)
        await engine.update_weights(update, 1)
        return await running

    segment = run(make_engine(), work)
    folder = (checkpoint, update)[segment.weight_version]
    np.testing.assert_allclose(segment.logprobs, reference_logprobs(folder, (5, *segment.token_ids), 1.0), atol=1e-5)


def test_weights_outlive_their_folder(make_engine: MakeEngine, update: Path, tmp_path: Path) -> None:
    """The trainer writes every export over the last: an engine that maps the file would change under the samples."""
    folder = tmp_path / "weights"
    shutil.copytree(update, folder)

    async def work(engine: RolloutEngine) -> tuple[Segment, Segment]:
        await engine.update_weights(folder, 1)
        first = await engine.generate(SampleRequest("a", (5, 6), 8, ()))
        file = folder / "model.safetensors"
        with file.open("r+b") as f:
            f.seek(file.stat().st_size // 2)
            f.write(b"\1" * (file.stat().st_size // 2))
        return first, await engine.generate(SampleRequest("a", (5, 6), 8, ()))

    first, second = run(make_engine(**GREEDY), work)
    assert first.token_ids == second.token_ids
    np.testing.assert_allclose(first.logprobs, second.logprobs, atol=1e-5)


def test_update_rejects_an_older_version(make_engine: MakeEngine, update: Path) -> None:
    with pytest.raises(ValueError, match="version 2 offered after version 3"):
        run(make_engine(weight_version=3), lambda e: e.update_weights(update, 2))


def test_an_impossible_request_is_refused(make_engine: MakeEngine) -> None:
    for request in (SampleRequest("a", (), 4, ()), SampleRequest("a", (1,), 0, ())):
        with pytest.raises(ValueError, match="a: cannot sample"):
            generate(make_engine(), [request])


def test_a_caller_who_leaves_disturbs_nobody(make_engine: MakeEngine) -> None:
    async def work(engine: RolloutEngine) -> list[Segment]:
        tasks = [asyncio.create_task(engine.generate(r)) for r in requests(6)]
        await asyncio.sleep(0.005)
        tasks[2].cancel()
        return await asyncio.gather(*tasks[:2], *tasks[3:])

    rest = run(make_engine(**GREEDY), work)
    want = generate(make_engine(**GREEDY), requests(6))
    assert [s.token_ids for s in rest] == [s.token_ids for i, s in enumerate(want) if i != 2]
