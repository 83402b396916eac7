"""What the embedded engine promises beyond the contract: noise that belongs to (seed, trajectory, position).

SGLang draws its noise from one generator per server (`sampling_seed` needs deterministic inference, which not every
attention backend has), and cannot tell which folder it would refuse before it has loaded it.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_engine import (
    MakeEngine,
    assert_interruptions_change_nothing,
    assert_logs_equal,
    generate,
    interrupted_often,
    prompts,
    requests,
    run,
)
from tiny import VOCAB_SIZE

from megatron_mopd.embedded.engine import EmbeddedEngine
from megatron_mopd.errors import UserError
from megatron_mopd.protocols import RolloutEngine, SampleRequest
from megatron_mopd.types import Segment


@pytest.mark.parametrize("pause", [False, True], ids=["in place", "prefilled again"])
def test_interrupting_a_sampled_trajectory_leaves_the_same_token_log(make_engine: MakeEngine, pause: bool) -> None:
    assert_interruptions_change_nothing(make_engine, {}, pause)


@pytest.mark.parametrize("retain_kv", [False, True], ids=["recomputed", "kept"])
@pytest.mark.parametrize("times", [1, 3, 10])
def test_interrupting_everything_leaves_the_same_sampled_token_log(
    make_engine: MakeEngine, times: int, retain_kv: bool
) -> None:
    asked = requests(9, tokens=200)
    logs = run(make_engine(retain_kv=retain_kv), lambda e: interrupted_often(e, asked, times))
    assert_logs_equal(generate(make_engine(), asked), logs, times)


@pytest.mark.parametrize("most", [4, 64], ids=["several waves", "one wave"])
def test_what_is_kept_is_freed_with_its_trajectories(make_engine: MakeEngine, most: int) -> None:
    async def work(engine: RolloutEngine) -> None:
        assert isinstance(engine, EmbeddedEngine)
        await interrupted_often(engine, requests(9, tokens=200), 5)
        assert engine._wave is None
        assert engine._kept is None

    run(make_engine(retain_kv=True, max_batch_size=most), work)


def test_the_noise_of_a_trajectory_does_not_depend_on_its_company(make_engine: MakeEngine) -> None:
    asked = requests(9)
    together = generate(make_engine(), asked)
    batches_of_two = generate(make_engine(max_batch_size=2), asked)
    alone = [generate(make_engine(), [request])[0] for request in asked]
    for one, two, three in zip(together, batches_of_two, alone, strict=True):
        assert one.token_ids == two.token_ids == three.token_ids
        np.testing.assert_allclose(one.logprobs, three.logprobs, atol=1e-5)


def test_seed_and_trajectory_change_the_noise(make_engine: MakeEngine) -> None:
    same_prompt = [SampleRequest(f"{i}", (7, 8, 9), 8, ()) for i in range(8)]
    first, other_seed = generate(make_engine(), same_prompt), generate(make_engine(seed=1), same_prompt)
    assert len({s.token_ids for s in first}) == 8
    assert all(a.token_ids != b.token_ids for a, b in zip(first, other_seed, strict=True))


def test_the_same_requests_give_the_same_bits_whatever_else_runs(make_engine: MakeEngine) -> None:
    """Agents that are woken every two tokens beside rows that run through, with and without a busy thread."""

    async def converse(engine: RolloutEngine, i: int, ids: tuple[int, ...]) -> list[float]:
        logprobs: list[float] = []
        for _ in range(5 if i % 3 else 1):
            segment = await engine.generate(SampleRequest(f"{i}", ids, 2 if i % 3 else 14, ()))
            ids += (*segment.token_ids, 11)
            logprobs += [*segment.token_ids, *segment.logprobs]
        return logprobs

    async def work(engine: RolloutEngine, delay_s: float) -> list[list[float]]:
        everyone = asyncio.gather(*[converse(engine, i, ids) for i, ids in enumerate(prompts(60))])

        async def disturb() -> None:
            while not everyone.done():
                await asyncio.to_thread(_burn, delay_s)
                await asyncio.sleep(0)

        others = asyncio.gather(*[disturb() for _ in range(2)])
        result = await everyone
        await others
        return result

    quiet, busy = (run(make_engine(max_batch_size=32), lambda e, s=s: work(e, s)) for s in (0.0, 0.003))
    assert quiet == busy


def _burn(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        torch.mm(torch.randn(64, 64), torch.randn(64, 64))


@pytest.mark.parametrize(
    "damage",
    [
        lambda t: t.pop("model.norm.weight"),
        lambda t: t.pop("model.layers.0.mlp.experts.7.up_proj.weight"),
        lambda t: t.update(surplus=torch.zeros(2)),
        lambda t: t.update({"model.layers.0.mlp.experts.8.up_proj.weight": torch.zeros(32, 64)}),
        lambda t: t.update({"model.norm.weight": torch.zeros(3)}),
    ],
    ids=["missing", "missing expert", "extra", "extra expert", "misshapen"],
)
def test_update_rejects_weights_that_do_not_fit_and_keeps_its_own(
    make_engine: MakeEngine, update: Path, tmp_path: Path, damage: Callable[[dict[str, torch.Tensor]], object]
) -> None:
    shutil.copytree(update, tmp_path / "weights")
    tensors = load_file(tmp_path / "weights/model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "weights/model.safetensors", metadata={"format": "pt"})
    asked = SampleRequest("a", (5, 6), 8, ())

    async def work(engine: RolloutEngine) -> tuple[Segment, Segment]:
        before = await engine.generate(asked)
        with pytest.raises(UserError, match="weights"):
            await engine.update_weights(tmp_path / "weights", 1)
        return before, await engine.generate(asked)

    before, after = run(make_engine(), work)
    assert before == after


def test_a_failure_reaches_every_caller_and_the_engine_lives_on(make_engine: MakeEngine) -> None:
    bad = SampleRequest("bad", (VOCAB_SIZE,), 4, ())  # no such token

    async def work(engine: RolloutEngine) -> list[Segment | BaseException]:
        first = await asyncio.gather(*[engine.generate(r) for r in (*requests(3), bad)], return_exceptions=True)
        assert all(isinstance(r, IndexError) for r in first)
        return await asyncio.gather(*[engine.generate(r) for r in requests(3)])

    assert run(make_engine(), work) == generate(make_engine(), requests(3))
