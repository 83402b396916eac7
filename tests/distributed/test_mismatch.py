"""What a step reports of tokens by their position, the mismatch of trainer and rollout and the reverse KL, equals its
definition, at every layout.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from learner_cases import batch_of, config_of, start
from ranks import Pools
from tiny import LAYOUTS, write_checkpoint

from megatron_mopd.batch import Batch
from megatron_mopd.config import Config
from megatron_mopd.step_metrics import NUM_AGES, Mean, StepMetrics

LAYOUTS = {name: LAYOUTS[name] for name in ("single", "DP2", "TP2xPP2", "CP2")}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder)
    return folder


def measure(config: Config, batch: Batch) -> tuple[np.ndarray, StepMetrics]:
    learner = start(config)
    return learner.logprobs(batch), learner.update(batch)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scale", [1.0, 1e-5], ids=["far", "near"])
def test_a_step_reports_the_mismatch_as_defined(layout: str, scale: float, ranks: Pools, model: Path) -> None:
    """d = rollout - trainer of the tokens that these weights have sampled; e^-d - 1 + d is an estimate of
    KL(rollout || trainer), see mcore/metrics.py.

    `near` is nearer to the size that real mismatches have, where float32 would lose all of it.
    """
    size, megatron = LAYOUTS[layout]
    config = config_of(model, {"lr": 0.0, **megatron}, learner={"micro_batch_tokens": 40})
    batch = batch_of()
    own = ranks(size)(measure, config, batch)[0][0]
    noise = np.random.default_rng(0).normal(0.1, 1.0, len(own)) * scale
    versions = -np.random.default_rng(1).choice(5, len(own), p=[0.6, 0.1, 0.1, 0.1, 0.1]).astype(np.int32)
    stale = versions < 0
    noise[stale] = 9.0 - versions[stale]
    batch = dataclasses.replace(
        batch, rollout_logprobs=(own + noise).astype(np.float32), weight_version=versions
    )  # fmt: skip
    trained, bucket, cell_of = trained_bucket_and_cell(batch)
    current = trained & ~stale
    reverse_kl = own.astype(np.float64) - batch.teacher_logprobs
    d = batch.rollout_logprobs.astype(np.float64) - own
    kl = np.exp(-d) - 1 + d
    for logprobs, metrics in ranks(size)(measure, config, batch):
        np.testing.assert_allclose(logprobs, own, atol=1e-6)
        for cell, of_cell in metrics.cells.items():
            here = trained & (cell_of == batch.cells.index(cell))
            now = here & current
            assert of_cell.mismatch == (pytest.approx(np.abs(d[now]).mean(), rel=1e-3), now.sum())
            assert of_cell.mismatch_max == pytest.approx(np.abs(d[now]).max(), rel=1e-3)
            assert of_cell.mismatch_kl == (pytest.approx(kl[now].mean(), rel=1e-2), now.sum())
            for i, mean in enumerate(of_cell.mismatch_quarters):
                there = now & (bucket // 5 == i)
                assert mean.count == there.sum()
                assert mean.value == pytest.approx(np.abs(d[there]).mean(), rel=1e-3)
            for i, mean in enumerate(of_cell.reverse_kl_deciles):
                there = here & (bucket // 2 == i)
                assert mean.count == there.sum()
                assert mean.value * mean.count == pytest.approx(reverse_kl[there].sum(), rel=1e-5)
            assert Mean.over(of_cell.reverse_kl_deciles) == (pytest.approx(of_cell.reverse_kl, rel=1e-12), here.sum())
            for age, mean in enumerate(of_cell.drift_by_age, start=1):
                there = here & (versions == -age if age < NUM_AGES else versions <= -age)
                assert mean == (pytest.approx(np.abs(d[there]).mean(), rel=1e-3), there.sum())
            assert of_cell.route_agreement.count == 0
        assert metrics.mismatch_kl == (pytest.approx(kl[current].mean(), rel=1e-2), current.sum())
        assert sum(m.count for m in metrics.mismatch_quarters) == current.sum()


def trained_bucket_and_cell(batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    trained = batch.loss_mask.copy()
    bucket, cell = np.full(len(trained), -1), np.zeros(len(trained), int)
    for row in range(len(batch)):
        where = np.arange(batch.offsets[row], batch.offsets[row + 1])
        trained[where[:1]] = False
        mine = where[trained[where]]
        bucket[mine] = [20 * i // len(mine) for i in range(len(mine))]
        cell[where] = batch.cell[row]
    return trained, bucket, cell
