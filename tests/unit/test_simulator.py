"""What partial rollouts promise, on the real scheduler in virtual time, at lengths as models have them."""

from __future__ import annotations

import asyncio
from functools import cache

import numpy as np
import pytest

from megatron_mopd.prompts.source import Place
from megatron_mopd.rollout.sampler import Sampling, sample
from tools.simulate_rollouts import (
    PROMPT_TOKENS,
    Prompts,
    Setting,
    Simulated,
    Turn,
    ks_distance,
    length_function,
    plot,
    read_quantiles,
    render,
    row_of,
    simulate,
    trained_lengths,
)
from tools.simulated_engine import Cluster, SimulatedEngine
from tools.virtual_time import run

REASONING, CHAT = "deepseek_r1_servegen_cap32k", "azure_conversation_2023"
SMALL = Cluster(engines=2)


@cache
def simulated(oversampling: float, lengths: str = REASONING, cluster: Cluster = SMALL, samples: int = 1) -> Simulated:
    return simulate(Setting(lengths, 128, 20, oversampling, 4, cluster, samples))


def test_half_more_in_flight_gives_more_than_twice_and_a_half_the_tokens() -> None:
    row = row_of(simulated(1.5), simulated(1.0))
    assert row["x"] > 2.5
    assert 0.3 < row["stale"] < 0.8
    assert row["bubble"] < simulated(1.0).bubble - 0.2


@pytest.mark.parametrize("lengths", [REASONING, CHAT])
@pytest.mark.parametrize("oversampling", [1.25, 1.5, 2.0])
def test_nothing_is_older_than_it_may_be(oversampling: float, lengths: str) -> None:
    one = simulated(oversampling, lengths)
    assert one.ages[:, 0].max() <= 4
    assert [len(names) for names in one.names] == [128] * 20


@pytest.mark.parametrize("lengths", [REASONING, CHAT])
def test_what_is_trained_on_has_the_lengths_of_the_distribution(lengths: str) -> None:
    """Over the steps after the warm-up; the first are short, and it says so."""
    one = simulated(1.5, lengths)
    late = trained_lengths(one)
    assert ks_distance(late, lengths) < 1.63 / len(late) ** 0.5, "at the 99 % level"
    assert row_of(one, one)["first length"] < 0.8
    want = np.interp([0.5, 0.9], *read_quantiles(lengths))
    np.testing.assert_allclose(np.quantile(late, [0.5, 0.9]), want, rtol=0.12)


@pytest.mark.parametrize("samples", [1, 3])
def test_without_oversampling_it_is_synchronous_to_the_last_digit(samples: int) -> None:
    """Against rollouts that know no scheduler."""
    setting = Setting(REASONING, 32, 4, 1.0, 4, SMALL, samples)

    async def plain() -> tuple[list[float], list[list[str]]]:
        engine = SimulatedEngine(SMALL, length_function(REASONING, 0))
        sampling = Sampling(engine, {"turn": Turn}, 32769, 2, PROMPT_TOKENS + 32769)
        seconds, names = [], []
        for step in range(4):
            await engine.update_weights(None, step)
            start = asyncio.get_running_loop().time()
            prompts = render([p for _, p in Prompts(32).take(Place(step, 0), 32)[0]])
            names.append([t.id async for t in sample(prompts, sampling, f"@{step}", samples)])
            seconds.append(asyncio.get_running_loop().time() - start)
        return seconds, names

    seconds, names = run(plain())
    one = simulate(setting)
    assert (one.seconds.tolist(), list(one.names)) == (seconds, names)
    assert one.stale_share == 0


def test_a_full_cache_costs_time_and_no_token() -> None:
    tight = Cluster(engines=2, kv_tokens=60_000)
    one, wide = simulated(1.5, cluster=tight), simulated(1.5)
    length_of = length_function(REASONING, 0)
    for names, lengths in zip(one.names, one.lengths, strict=True):
        assert lengths.tolist() == [length_of(name) for name in names]
    assert one.seconds.sum() > wide.seconds.sum()


def test_the_plot_has_a_line_for_each_setting() -> None:
    svg = plot([simulated(1.0), simulated(1.5)])
    assert svg.count("data-series") == 2
    assert svg.count("<svg") == svg.count("</svg>") == 1
