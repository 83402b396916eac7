"""Per-cell sums of an update: added up in float64 over micro-batches and ranks, then read once as StepMetrics.

The mismatch of a token is m = trainer - rollout log-prob of the same weights. Its KL is estimated from the tokens as
they were sampled, from the rollout's distribution q, against the trainer's p. With the ratio p(y) / q(y) = e^m,

    KL(q || p) = E_{y ~ q}[-m] = E_{y ~ q}[e^m - 1 - m]         since E_{y ~ q}[e^m] = sum_y p(y) = 1

and the second form (k3 of http://joschu.net/blog/kl-approx.html) is never negative and varies less. It is computed in
float64: e^m - 1 - m is about m^2 / 2, far below the rounding of float32.

Shape suffixes: T packed tokens, C cells, M sums per cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from megatron_mopd.mcore import device
from megatron_mopd.mcore.collectives import from_last_stage, gather_over_data
from megatron_mopd.mcore.microbatch import DeviceMicroBatch
from megatron_mopd.objectives.objective import TokenTerms
from megatron_mopd.types import NUM_QUARTERS, Cell, CellMetrics, Mean


class _Sum(IntEnum):
    TOKENS = 0
    REVERSE_KL = 1
    CLIPPED = 2
    ENTROPY = 3
    MISMATCH = 4
    MASKED = 5
    LOSS = 6
    MISMATCH_KL = 7
    QUARTER_TOKENS = 8  # and the three after it
    QUARTER_MISMATCH = 12  # and the three after it
    MISMATCH_MAX = 16  # a maximum, and the last: everything before it is added


_NUM_SUMS = _Sum.MISMATCH_MAX + 1


def micro_batch_sums(
    terms: TokenTerms, micro: DeviceMicroBatch, logprobs_T: Tensor, entropy_T: Tensor, num_cells: int
) -> Tensor:
    """[C, M] float64 of one micro-batch on one context-parallel rank."""
    size = terms.mismatch_T.abs()
    quarters = [terms.trained_T & (micro.quarter_T == i) for i in range(NUM_QUARTERS)]
    per_token = (
        terms.trained_T,
        terms.reverse_kl_T,
        terms.clipped_T,
        entropy_T.where(terms.trained_T, 0.0),
        size,
        micro.columns.loss_mask_T & ~terms.trained_T,
        terms.coefficient_T * logprobs_T,
        torch.expm1(terms.mismatch_T.double()) - terms.mismatch_T.double(),
        *quarters,
        *(size.where(quarter_T, 0.0) for quarter_T in quarters),
    )
    values_TM = torch.stack([x.double() for x in per_token], dim=-1)
    sums_CM = values_TM.new_zeros(num_cells, _NUM_SUMS)
    sums_CM[:, : _Sum.MISMATCH_MAX].index_add_(0, micro.cell_T, values_TM)
    sums_CM[:, _Sum.MISMATCH_MAX].scatter_reduce_(0, micro.cell_T, size.double(), "amax")
    return sums_CM


def reduce_sums(parts: Sequence[Tensor], num_cells: int) -> np.ndarray:
    """[C, M] of the whole batch, the same on every rank, from the micro-batches of a last-stage rank (none elsewhere).

    One gather over data and context parallelism and one broadcast along the pipeline, added in rank order
    (reproducible). Tensor-parallel ranks hold equal sums and are not counted again.
    """
    zero_CM = torch.zeros(num_cells, _NUM_SUMS, dtype=torch.float64, device=device.DEVICE)
    total_CM = _combine(gather_over_data(_combine(torch.stack([zero_CM, *parts]))))
    from_last_stage(total_CM)
    return total_CM.cpu().numpy()


def _combine(parts: Tensor) -> Tensor:
    """[parts, C, M] -> [C, M]"""
    total_CM = parts.sum(0)
    total_CM[:, _Sum.MISMATCH_MAX] = parts[:, :, _Sum.MISMATCH_MAX].amax(0)
    return total_CM


def total_loss(sums_CM: np.ndarray) -> float:
    return float(sums_CM[:, _Sum.LOSS].sum())


def cell_metrics(
    sums_CM: np.ndarray, routes_C2: np.ndarray, cells: Sequence[Cell], cell_of_row: np.ndarray
) -> dict[Cell, CellMetrics]:
    """Metrics of each cell with a row in the batch. `routes_C2`: (agreeing, recorded) choices of experts."""
    trajectories = np.bincount(cell_of_row, minlength=len(cells))
    columns = (sums_CM.tolist(), routes_C2.tolist(), trajectories.tolist())
    out = {}
    for cell, sums, routes, rows in zip(cells, *columns, strict=True):
        if rows:
            tokens = int(sums[_Sum.TOKENS])
            per_token = 1.0 / max(1, tokens)
            out[cell] = CellMetrics(
                trajectories=rows,
                tokens=tokens,
                reverse_kl=sums[_Sum.REVERSE_KL] * per_token,
                clip_fraction=sums[_Sum.CLIPPED] * per_token,
                entropy=sums[_Sum.ENTROPY] * per_token,
                mismatch=sums[_Sum.MISMATCH] * per_token,
                mismatch_max=sums[_Sum.MISMATCH_MAX],
                masked_tokens=int(sums[_Sum.MASKED]),
                mismatch_kl=sums[_Sum.MISMATCH_KL] * per_token,
                mismatch_quarters=_quarter_means(sums),
                route_agreement=Mean(routes[0] / max(1.0, routes[1]), int(routes[1])),
            )
    return out


def _quarter_means(sums: Sequence[float]) -> tuple[Mean, ...]:
    tokens = [int(sums[_Sum.QUARTER_TOKENS + i]) for i in range(NUM_QUARTERS)]
    return tuple(Mean(sums[_Sum.QUARTER_MISMATCH + i] / max(1, n), n) for i, n in enumerate(tokens))
