"""Laws of the domains' factors: by hand, from the whole batch alone, and never a change of the loss's scale."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_mopd.batch import Batch
from megatron_mopd.config import Config, Objective, check_domains
from megatron_mopd.errors import UserError
from megatron_mopd.objectives.balance import batch_weights, inverse_deviation
from megatron_mopd.objectives.normalisation import row_weights
from megatron_mopd.types import Cell

CELLS = (Cell("law", "low"), Cell("law", "high"), Cell("code", "max"))


def batch_of(rows: list[tuple[int, list[float]]]) -> Batch:
    """Rows of (cell, advantages): a prompt of one token, then a trained token for each advantage."""
    lengths = [1 + len(advantages) for _, advantages in rows]
    advantage = np.concatenate([[0.0, *advantages] for _, advantages in rows]).astype(np.float32)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    mask = np.ones(len(advantage), bool)
    mask[offsets[:-1]] = False
    return Batch(
        offsets=offsets,
        cell=np.array([cell for cell, _ in rows], np.int32),
        token_ids=np.zeros(len(advantage), np.int32),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, np.float32(-8), np.float32(0)),
        teacher_logprobs=np.where(mask, advantage - np.float32(8), np.float32(0)),
        weight_version=np.zeros(len(advantage), np.int32),
        cells=CELLS,
    )


def random_batch(seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    scale = (1.0, 2.0, 5.0)
    return batch_of([(cell, rng.normal(1, scale[cell], n).tolist()) for n, cell in enumerate(rng.integers(0, 3, 40))])


def factor_of(batch: Batch, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    return batch_weights(batch, Objective(**options))


def test_inverse_deviation_by_hand() -> None:
    """law 0 and 2: sigma 1. All 0, 2, 4: sigma sqrt(8 / 3). One token of code has no deviation: 1. Total weight: 1."""
    batch = batch_of([(0, [0.0, 2.0]), (2, [4.0])])
    weights, factors = factor_of(batch, domain_balance="inverse_deviation")
    scale = 1 / ((np.sqrt(8 / 3) + 1) / 2)
    np.testing.assert_allclose(factors, np.array([np.sqrt(8 / 3), np.sqrt(8 / 3), 1]) * scale, rtol=1e-12)
    np.testing.assert_allclose(weights, [np.sqrt(8 / 3) * scale / 4, scale / 2], rtol=1e-6)


@pytest.mark.parametrize(
    ("advantages", "factors"),
    [
        ([[0, 2], [0, 20]], [4.0, np.std([0, 2, 0, 20]) / 10]),  # a ratio of 8.4
        ([[0] * 60 + [1] * 60, [-99, 99]], [4.0, 0.25]),
        ([[1, 1, 1], [0, 2, 1]], [4.0, np.std([1, 1, 1, 0, 2, 1]) / np.std([0, 2, 1])]),  # no deviation at all
        ([[1, 1], [1, 1]], [1.0, 1.0]),
        ([[], [1, 3]], [1.0, 1.0]),
    ],
    ids=str,
)
def test_inverse_deviation_stays_within_its_bounds(advantages: list[list[float]], factors: list[float]) -> None:
    sums = [[len(a), sum(a), sum(x * x for x in a)] for a in advantages]
    np.testing.assert_allclose(inverse_deviation(np.array(sums, float)), factors, rtol=1e-12)


@pytest.mark.parametrize("normalisation", ["sequence", "token"])
def test_without_factors_weights_are_the_plain_ones_bit_for_bit(normalisation: str) -> None:
    batch = random_batch()
    weights, factors = factor_of(batch, normalisation=normalisation)
    np.testing.assert_array_equal(weights, row_weights(batch.loss_tokens, normalisation))  # pyright: ignore
    assert factors.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("normalisation", ["sequence", "token"])
@pytest.mark.parametrize("balance", ["none", "inverse_deviation"])
def test_the_tokens_of_a_batch_weigh_together_what_they_do_without_factors(normalisation: str, balance: str) -> None:
    batch = random_batch()
    options = {"normalisation": normalisation, "domain_balance": balance}
    weights, factors = factor_of(batch, **options, domain_weights={"law": 3.0, "code": 0.5})
    plain = row_weights(batch.loss_tokens, normalisation)  # pyright: ignore[reportArgumentType]
    assert (weights * batch.loss_tokens).sum() == pytest.approx((plain * batch.loss_tokens).sum(), rel=1e-6)
    np.testing.assert_allclose(weights, plain * factors[batch.cell], rtol=1e-6)
    assert factors[0] == factors[1] != factors[2], "a domain has one factor"
    same_ratio, _ = factor_of(batch, **options, domain_weights={"law": 6.0})
    np.testing.assert_allclose(same_ratio, weights, rtol=1e-6)


def test_both_kinds_of_factors_multiply() -> None:
    batch, static = random_batch(), {"code": 3.0}
    (_, both), (_, measured) = (
        factor_of(batch, domain_balance="inverse_deviation", domain_weights=given) for given in (static, {})
    )
    assert both[2] / both[0] == pytest.approx(3 * measured[2] / measured[0])


def test_factors_do_not_depend_on_the_order_of_rows() -> None:
    batch = random_batch()
    order = np.random.default_rng(1).permutation(len(batch)).tolist()
    options = {"domain_balance": "inverse_deviation"}
    np.testing.assert_allclose(
        factor_of(batch.select(order), **options)[0], factor_of(batch, **options)[0][order], rtol=1e-6
    )


def test_sums_of_a_row_are_those_of_its_trained_finite_tokens() -> None:
    batch = batch_of([(0, [1.0, 2.0, np.nan, -np.inf, 4.0]), (1, []), (2, [-3.0])])
    batch.loss_mask[2] = False  # the advantage of 2
    batch.loss_mask[0] = True  # a first token has no context
    np.testing.assert_array_equal(batch.advantage_sums, [[2, 5, 17], [0, 0, 0], [1, -3, 9]])


def config_of(**objective: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"folder": "unused", "num_steps": 1},
            "student": {"checkpoint": "unused"},
            "prompts": {"files": ["unused"], "batch_size": 1, "mixture": {"law": 1, "code": 1}},
            "environments": {},
            "rollout": {"max_response_tokens": 8},
            "objective": objective,
        }
    )


def test_a_weight_of_a_domain_that_is_never_drawn_is_refused() -> None:
    check_domains(config_of(domain_weights={"law": 2.0}))
    with pytest.raises(
        UserError, match=r"objective\.domain_weights\.lwa: no such domain in prompts\.mixture, .*law, c"
    ):
        check_domains(config_of(domain_weights={"law": 2.0, "lwa": 1.0}))
