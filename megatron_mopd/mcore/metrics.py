"""Per-cell sums of an update: added up in float64 over micro-batches and ranks, then read once as StepMetrics.

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
from megatron_mopd.objectives.objective import TokenColumns, TokenTerms
from megatron_mopd.types import Cell, CellMetrics


class _Sum(IntEnum):
    TOKENS = 0
    REVERSE_KL = 1
    CLIPPED = 2
    ENTROPY = 3
    MISMATCH = 4
    MASKED = 5
    LOSS = 6
    MISMATCH_MAX = 7  # a maximum, and the last: everything before it is added


def micro_batch_sums(
    terms: TokenTerms, columns: TokenColumns, logprobs_T: Tensor, entropy_T: Tensor, cell_T: Tensor, num_cells: int
) -> Tensor:
    """[C, M] float64 of one micro-batch on one context-parallel rank."""
    size = terms.mismatch_T.abs()
    per_token = (
        terms.trained_T,
        terms.reverse_kl_T,
        terms.clipped_T,
        entropy_T.where(terms.trained_T, 0.0),
        size,
        columns.loss_mask_T & ~terms.trained_T,
        terms.coefficient_T * logprobs_T,
    )
    values_TM = torch.stack([x.double() for x in per_token], dim=-1)
    sums_CM = values_TM.new_zeros(num_cells, len(_Sum))
    sums_CM[:, : _Sum.MISMATCH_MAX].index_add_(0, cell_T, values_TM)
    sums_CM[:, _Sum.MISMATCH_MAX].scatter_reduce_(0, cell_T, size.double(), "amax")
    return sums_CM


def reduce_sums(parts: Sequence[Tensor], num_cells: int) -> np.ndarray:
    """[C, M] of the whole batch, the same on every rank, from the micro-batches of a last-stage rank (none elsewhere).

    One gather over data and context parallelism and one broadcast along the pipeline, added in rank order
    (reproducible). Tensor-parallel ranks hold equal sums and are not counted again.
    """
    zero_CM = torch.zeros(num_cells, len(_Sum), dtype=torch.float64, device=device.DEVICE)
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


def cell_metrics(sums_CM: np.ndarray, cells: Sequence[Cell], cell_of_row: np.ndarray) -> dict[Cell, CellMetrics]:
    """Metrics of each cell with a row in the batch."""
    trajectories = np.bincount(cell_of_row, minlength=len(cells))
    out = {}
    for cell, sums, rows in zip(cells, sums_CM.tolist(), trajectories.tolist(), strict=True):
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
            )
    return out
