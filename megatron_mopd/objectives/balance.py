"""Weights of rows with factors of their domains: how much a trajectory of each domain counts in the loss.

    domain_weights                        the user's factors, 1 for a domain without
    domain_balance: inverse_deviation     sigma / sigma_d within [1/4, 4]        (DN-MOPD, arXiv 2609.35347)

sigma is the standard deviation of the advantage (teacher - rollout log-probs, not clipped) over the trained tokens of
the batch, sigma_d over those of domain d. Both factors multiply, and then all are scaled so that the tokens of the
batch weigh together what they weigh without: the loss stays a mean, of trajectories that count more or less, and a
learning rate and a clip_grad keep their meaning. So only the ratios of factors matter.

Promises (tests/unit/test_balance.py): computed from the rows of the whole batch, whatever the layout; without a factor
the weights are those of normalisation.py, bit for bit.

Shape suffixes: n rows, C cells, D domains.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from megatron_mopd import config
from megatron_mopd.objectives.normalisation import row_weights
from megatron_mopd.types import Cell

BOUND = 4.0


class Rows(Protocol):
    """What of a batch decides weights: of batch.Batch or store.StoredBatch."""

    @property
    def cells(self) -> tuple[Cell, ...]: ...
    @property
    def cell(self) -> np.ndarray: ...
    @property
    def loss_tokens(self) -> np.ndarray: ...
    @property
    def advantage_sums(self) -> np.ndarray: ...


def batch_weights(batch: Rows, options: config.Objective) -> tuple[np.ndarray, np.ndarray]:
    """The weight of each token of a row, [n] float32, and the factor in it that each cell has from its domain, [C]."""
    weights_n = row_weights(batch.loss_tokens, options.normalisation)
    if not options.weighs_domains:
        return weights_n, np.ones(len(batch.cells))
    factors_C = _factors(batch, options)
    total_n = weights_n.astype(np.float64) * batch.loss_tokens
    weighted = float((total_n * factors_C[batch.cell]).sum())
    if weighted:
        factors_C = factors_C * (float(total_n.sum()) / weighted)
    return (weights_n * factors_C[batch.cell]).astype(np.float32), factors_C


def _factors(batch: Rows, options: config.Objective) -> np.ndarray:
    """[C], before they are scaled."""
    domains = list(dict.fromkeys(cell.domain for cell in batch.cells))
    domain_C = np.array([domains.index(cell.domain) for cell in batch.cells])
    factors_D = np.array([options.domain_weights.get(domain, 1.0) for domain in domains])
    if options.domain_balance == "inverse_deviation":
        sums_D3 = np.zeros((len(domains), 3))
        np.add.at(sums_D3, domain_C[batch.cell], batch.advantage_sums)
        factors_D = factors_D * inverse_deviation(sums_D3)
    return factors_D[domain_C]


def inverse_deviation(sums_D3: np.ndarray) -> np.ndarray:
    """[D] from the number, sum and sum of squares of each domain's advantages. 1 for a domain with fewer than two."""
    overall, deviation_D = _deviation(sums_D3.sum(0)), _deviation(sums_D3)
    known_D = (sums_D3[:, 0] > 1) & (overall > 0)
    ratio_D = np.divide(overall, deviation_D, out=np.full(len(sums_D3), np.inf), where=deviation_D > 0)
    return np.where(known_D, np.clip(ratio_D, 1 / BOUND, BOUND), 1.0)


def _deviation(sums: np.ndarray) -> np.ndarray:
    """Of the last axis: number, sum, sum of squares."""
    number, total, square = np.moveaxis(sums, -1, 0)
    number = np.maximum(number, 1.0)
    return np.sqrt(np.maximum(square / number - np.square(total / number), 0.0))
