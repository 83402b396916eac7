"""Per-cell sums of an update: added up in float64 over micro-batches and ranks, then read once as StepMetrics.

The mismatch of a token is m = trainer - rollout log-prob of the same weights: tokens that older weights have sampled
differ by what was learnt since, and are left out. Its KL is estimated from the tokens as
they were sampled, from the rollout's distribution q, against the trainer's p. With the ratio p(y) / q(y) = e^m,

    KL(q || p) = E_{y ~ q}[-m] = E_{y ~ q}[e^m - 1 - m]         since E_{y ~ q}[e^m] = sum_y p(y) = 1

and the second form (k3 of http://joschu.net/blog/kl-approx.html) is never negative and varies less. It is computed in
float64: e^m - 1 - m is about m^2 / 2, far below the rounding of float32.

The gradient of the loss with respect to the logits of a token is its coefficient times that of its log-prob or
divergence, whose size the head knows (objectives/logprob_head.py, objectives/distribution.py): so the gradient of each
cell is measured without another backward pass.

Shape suffixes: T packed tokens, C cells, M sums per cell, B position buckets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from megatron_mopd import config
from megatron_mopd.mcore import device
from megatron_mopd.mcore.collectives import from_last_stage, gather_over_data
from megatron_mopd.mcore.microbatch import DeviceMicroBatch
from megatron_mopd.objectives.distribution import TargetDivergence
from megatron_mopd.objectives.logprob_head import TargetLogprobs
from megatron_mopd.objectives.objective import TokenTerms
from megatron_mopd.step_metrics import NOTHING, NUM_AGES, NUM_BUCKETS, NUM_DECILES, NUM_QUARTERS, CellMetrics, Mean
from megatron_mopd.types import Cell


class _Sum(IntEnum):
    TOKENS = 0
    REVERSE_KL = 1
    CLIPPED = 2
    ENTROPY = 3
    MISMATCH = 4
    MASKED = 5
    LOSS = 6
    MISMATCH_KL = 7
    GRAD_SQUARE = 8
    KL = 9
    CURRENT = 10  # tokens that were sampled by the weights that are updated: those of a mismatch
    RATIO_CLIPPED = 11
    RATIO_MASKED = 12
    RATIO_TRUNCATED = 13
    BUCKETS = 14  # tokens, reverse KL, current tokens and mismatch of the first bucket, then of the others
    AGES = BUCKETS + 4 * NUM_BUCKETS  # tokens of older weights and their drift, of each age
    MISMATCH_MAX = AGES + 2 * NUM_AGES  # a maximum, and the last: everything before it is added


_NUM_SUMS = _Sum.MISMATCH_MAX + 1


def micro_batch_sums(
    terms: TokenTerms,
    micro: DeviceMicroBatch,
    scored: TargetLogprobs | TargetDivergence,
    num_cells: int,
    weight_version: int,
) -> Tensor:
    """[C, M] float64 of one micro-batch on one context-parallel rank, from weights of that version."""
    current_T = terms.trained_T & (micro.weight_version_T == weight_version)
    mismatch_T = terms.mismatch_T.double().where(current_T, 0.0)
    size = mismatch_T.abs()
    kl_T = scored.divergence_T if isinstance(scored, TargetDivergence) else torch.zeros_like(size)
    per_token = (
        terms.trained_T,
        terms.reverse_kl_T,
        terms.clipped_T,
        scored.entropy_T.where(terms.trained_T, 0.0),
        size,
        micro.columns.loss_mask_T & ~terms.trained_T,
        terms.coefficient_T * scored.value_T,
        torch.expm1(mismatch_T) - mismatch_T,
        terms.coefficient_T.double().square() * scored.grad_square_T,
        kl_T.where(terms.trained_T, 0.0),
        current_T,
        *_touched(terms),
    )
    age_T = (weight_version - micro.weight_version_T).clamp(1, NUM_AGES)
    stale_T = terms.trained_T & (micro.weight_version_T < weight_version)
    by_age = (stale_T, terms.mismatch_T.double().abs().where(stale_T, 0.0))
    by_position = (terms.trained_T, terms.reverse_kl_T, current_T, size)
    largest_C = size.new_zeros(num_cells).scatter_reduce_(0, micro.cell_T, size, "amax")
    parts = (
        _added(per_token, micro.cell_T, num_cells),
        _added(by_position, micro.cell_T * NUM_BUCKETS + micro.bucket_T, num_cells * NUM_BUCKETS),
        _added(by_age, micro.cell_T * NUM_AGES + age_T - 1, num_cells * NUM_AGES),
        largest_C,
    )
    return torch.cat([part.view(num_cells, -1) for part in parts], dim=1)


def _touched(terms: TokenTerms) -> tuple[Tensor, Tensor, Tensor]:
    """Trained tokens that each device of objectives/ratio.py has touched."""
    if terms.ratio is None:
        none_T = torch.zeros_like(terms.trained_T)
        return none_T, none_T, none_T
    touched = (terms.ratio.clipped_T, terms.ratio.masked_T, terms.ratio.truncated_T)
    clipped_T, masked_T, truncated_T = (touched_T & terms.trained_T for touched_T in touched)
    return clipped_T, masked_T, truncated_T


def _added(columns: Sequence[Tensor], index_T: Tensor, size: int) -> Tensor:
    """[size, columns] float64: each column added up over the tokens of the same index."""
    values = torch.stack([column.double() for column in columns], dim=-1)
    return values.new_zeros(size, len(columns)).index_add_(0, index_T, values)


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
    sums_CM: np.ndarray,
    routes_C2: np.ndarray,
    cells: Sequence[Cell],
    cell_of_row: np.ndarray,
    factors_C: np.ndarray,
    options: config.Objective,
) -> dict[Cell, CellMetrics]:
    """Metrics of each cell with a row in the batch. `routes_C2`: (agreeing, recorded) choices of experts; `factors_C`:
    those of objectives/balance.py; `options` say which numbers are measured at all."""
    trajectories = np.bincount(cell_of_row, minlength=len(cells))
    columns = (sums_CM, routes_C2.tolist(), trajectories.tolist(), factors_C.tolist())
    out = {}
    for cell, sums_M, routes, rows, factor in zip(cells, *columns, strict=True):
        if rows:
            sums = sums_M.tolist()
            tokens = int(sums[_Sum.TOKENS])
            tokens_B, reverse_kl_B, current_B, mismatch_B = sums_M[_Sum.BUCKETS : _Sum.AGES].reshape(NUM_BUCKETS, 4).T
            stale_A, drift_A = sums_M[_Sum.AGES : _Sum.MISMATCH_MAX].reshape(NUM_AGES, 2).T
            per_token, current = 1.0 / max(1, tokens), int(sums[_Sum.CURRENT])
            per_current = 1.0 / max(1, current)
            out[cell] = CellMetrics(
                trajectories=rows,
                tokens=tokens,
                reverse_kl=sums[_Sum.REVERSE_KL] * per_token,
                clip_fraction=sums[_Sum.CLIPPED] * per_token,
                entropy=sums[_Sum.ENTROPY] * per_token,
                mismatch=Mean(sums[_Sum.MISMATCH] * per_current, current),
                mismatch_max=sums[_Sum.MISMATCH_MAX],
                masked_tokens=int(sums[_Sum.MASKED]),
                mismatch_kl=Mean(sums[_Sum.MISMATCH_KL] * per_current, current),
                mismatch_quarters=_means(mismatch_B, current_B, NUM_QUARTERS),
                drift_by_age=_means(drift_A, stale_A, NUM_AGES),
                route_agreement=Mean(routes[0] / max(1.0, routes[1]), int(routes[1])),
                reverse_kl_deciles=_means(reverse_kl_B, tokens_B, NUM_DECILES),
                logit_grad_norm=math.sqrt(sums[_Sum.GRAD_SQUARE]),
                weight=factor,
                kl=_mean_if(options.needs_hidden, sums[_Sum.KL], tokens),
                ratio_clipped=_mean_if(options.ratio.clips, sums[_Sum.RATIO_CLIPPED], tokens),
                ratio_masked=_mean_if(options.ratio.masks, sums[_Sum.RATIO_MASKED], tokens),
                ratio_truncated=_mean_if(options.ratio.truncates, sums[_Sum.RATIO_TRUNCATED], tokens),
            )
    return out


def _mean_if(is_measured: bool, total: float, count: int) -> Mean:
    return Mean(total / max(1, count), count) if is_measured else NOTHING


def _means(sums_B: np.ndarray, tokens_B: np.ndarray, parts: int) -> tuple[Mean, ...]:
    """Means over `parts` stretches of buckets, equally long."""
    sums, tokens = (x_B.reshape(parts, -1).sum(1).tolist() for x_B in (sums_B, tokens_B))
    return tuple(Mean(total / max(1.0, n), int(n)) for total, n in zip(sums, tokens, strict=True))
