"""Which rows go into which micro-batch of which data-parallel rank, and how a micro-batch is laid out (numpy only).

Rows are packed back to back ("thd"), so there is no padding to the longest row. A row of L tokens gives L - 1 inputs,
each aligned with the token it predicts. What is padded, and what that costs: - with context parallelism each row goes
up to a multiple of 2 * cp, under 2 * cp tokens a row; - a micro-batch goes up to a multiple of tp * 2 * cp (tp when
cp = 1) by one dummy sequence of token 0, under that many
  tokens; a micro-batch without rows is such a dummy alone, so that its rank joins every collective.
Padding has mask and weight 0. It does pass through the experts, and counts in their load-balancing statistics.

Promises: `plan` depends on lengths alone, so every rank computes the same one; all ranks get equally many
micro-batches.

Shape suffixes: n rows, N tokens of all rows, T packed tokens on this context-parallel rank, S those in the mask.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from megatron_mopd.batch import Batch
from megatron_mopd.step_metrics import NUM_BUCKETS

MicroBatchRows = list[int]


def plan(lengths: np.ndarray, dp_size: int, max_tokens: int, multiple: int = 1) -> list[list[MicroBatchRows]]:
    """For every data-parallel rank the rows of each of its micro-batches: [dp_size][num_micro_batches], rows ascending.

    The fewest micro-batches per rank, a multiple of `multiple`, such that longest-first filling of the emptiest keeps
    each within `max_tokens`; a row longer than that is alone in its micro-batch. Rows of equal length spread so that
    counts differ by at most one. Micro-batches at the same place of different ranks have similar sizes, because expert
    parallelism makes those ranks wait for each other.
    """
    order = np.argsort(-lengths, kind="stable").tolist()
    num = max(1, -(-int(lengths.sum()) // (dp_size * max_tokens)))
    num = -(-num // multiple) * multiple
    while (bins := _fill(lengths, order, dp_size * num, max_tokens)) is None:
        num += multiple
    ranks: list[list[MicroBatchRows]] = [[] for _ in range(dp_size)]
    for i in range(num):
        layer = bins[i * dp_size : (i + 1) * dp_size]
        # Every other layer backwards: the rank with the largest of one layer takes the smallest of the next.
        for rank, rows in zip(ranks, layer if i % 2 == 0 else layer[::-1], strict=True):
            rank.append(sorted(rows))
    return ranks


def _fill(lengths: np.ndarray, order: list[int], num_bins: int, max_tokens: int) -> list[MicroBatchRows] | None:
    """Rows, longest first, each into the emptiest bin; bins by falling size. None where a shared bin overflows."""
    bins: list[MicroBatchRows] = [[] for _ in range(num_bins)]
    heap = [(0, i) for i in range(num_bins)]
    length_of = lengths.tolist()
    for row in order:
        tokens, i = heap[0]
        tokens += length_of[row]
        if bins[i] and tokens > max_tokens:
            return None
        bins[i].append(row)
        heapq.heapreplace(heap, (tokens, i))
    sizes = {i: tokens for tokens, i in heap}
    return [bins[i] for i in sorted(range(num_bins), key=lambda i: (-sizes[i], i))]


def padded_length(lengths: np.ndarray, tp: int, cp: int) -> int:
    """Packed tokens, padding included, of a micro-batch with rows of these lengths, over all context-parallel ranks."""
    row_multiple, total_multiple = _multiples(tp, cp)
    rows = -(-np.maximum(lengths - 1, 0) // row_multiple) * row_multiple
    return max(total_multiple, -(-int(rows.sum()) // total_multiple) * total_multiple)


def _multiples(tp: int, cp: int) -> tuple[int, int]:
    row = 2 * cp if cp > 1 else 1
    return row, row * tp


@dataclass(frozen=True)
class MicroBatch:
    """One packed micro-batch as one context-parallel rank sees it. Columns are those of the predicted token."""

    cu_seqlens: np.ndarray
    """int32, bounds of the padded sequences over all context-parallel ranks; the last may be the dummy."""
    max_seqlen: int
    input_ids: np.ndarray  # [T] int64
    position_ids: np.ndarray  # [T] int64, within the row
    target_ids: np.ndarray  # [T] int64
    token: np.ndarray
    """[T] int64: index of the predicted token among the N tokens of the rows that were packed; -1 on padding."""
    loss_mask: np.ndarray  # [T] bool
    weight: np.ndarray  # [T] float32
    rollout_logprobs: np.ndarray  # [T] float32
    teacher_logprobs: np.ndarray  # [T] float32
    outcome_advantage: np.ndarray  # [T] float32
    weight_version: np.ndarray  # [T] int64
    cell: np.ndarray  # [T] int64, index into Batch.cells; 0 on padding
    bucket: np.ndarray
    """[T] int64: where among its row's trained tokens the token is, 0 to NUM_BUCKETS - 1; 0 where it is not trained."""
    routed_experts: np.ndarray | None
    """[T, L, K] int16: the experts of the input; -1 where none were recorded, and on padding."""
    teacher_hidden: np.ndarray | None
    """[S, D]: the teacher's last hidden states, of the predicted tokens in the mask alone."""


def pack(batch: Batch, weights: np.ndarray, tp: int, cp: int, cp_rank: int) -> MicroBatch:
    """Lay out the rows of `batch` in order. `weights` [n] is the weight of each row's tokens (row_weights).

    With cp > 1 the padded length of a row is cut into 2 * cp chunks and rank r holds chunks r and 2 * cp - 1 - r, as
    Megatron-Core and Transformer Engine lay out packed sequences.
    """
    row_multiple, _ = _multiples(tp, cp)
    lengths = np.maximum(batch.lengths - 1, 0)
    padded = -(-lengths // row_multiple) * row_multiple
    total = padded_length(batch.lengths, tp, cp)
    dummy = total - int(padded.sum())
    padded = np.append(padded, dummy)[: len(padded) + (dummy > 0)]
    padded = padded[padded > 0]
    cu_seqlens = _bounds(padded)

    # Where each predicted token lies: `source_T` among the tokens of the batch, and the place of its input in the pack.
    rows = np.flatnonzero(lengths)
    starts = cu_seqlens[: len(rows)]
    source = _ranges(batch.offsets[rows] + 1, lengths[rows])
    place = _ranges(starts, lengths[rows])
    token = np.full(total, -1, np.int64)
    token[place] = source
    position = _ranges(np.zeros_like(padded), padded)
    row_of_token = np.repeat(np.arange(len(batch)), batch.lengths)

    local = _zigzag(cu_seqlens, cp, cp_rank)
    token, position = token[local], position[local]
    real = token >= 0
    row = row_of_token[token[real]]

    def column(values: np.ndarray | float, dtype: type) -> np.ndarray:
        out = np.zeros(len(token), dtype)
        out[real] = values
        return out

    at = token[real]
    in_mask = at[batch.loss_mask[at]]
    return MicroBatch(
        cu_seqlens=cu_seqlens.astype(np.int32),
        max_seqlen=int(padded.max()),
        input_ids=column(batch.token_ids[at - 1], np.int64),
        position_ids=position,
        target_ids=column(batch.token_ids[at], np.int64),
        token=token,
        loss_mask=column(batch.loss_mask[at], np.bool_),
        weight=column(weights[row], np.float32),
        rollout_logprobs=column(batch.rollout_logprobs[at], np.float32),
        teacher_logprobs=column(batch.teacher_logprobs[at], np.float32),
        outcome_advantage=column(0.0 if batch.outcome_advantage is None else batch.outcome_advantage[row], np.float32),
        weight_version=column(batch.weight_version[at], np.int64),
        cell=column(batch.cell[row], np.int64),
        bucket=column(_buckets(batch)[at], np.int64),
        routed_experts=None if batch.routed_experts is None else _routes(batch.routed_experts, token),
        teacher_hidden=None if batch.teacher_hidden is None else batch.teacher_hidden[in_mask],
    )


def _buckets(batch: Batch) -> np.ndarray:
    """[N]: trained token i of the n of its row is in bucket 20 * i // n."""
    trained = batch.loss_mask.copy()
    trained[batch.offsets[:-1][batch.lengths > 0]] = False  # the first token of a row has no context
    before = np.concatenate([[0], np.cumsum(trained)])
    index = before[:-1] - np.repeat(before[batch.offsets[:-1]], batch.lengths)
    return np.where(trained, NUM_BUCKETS * index // np.maximum(1, np.repeat(batch.loss_tokens, batch.lengths)), 0)


def _routes(routes: np.ndarray, token: np.ndarray) -> np.ndarray:
    """The rows of the inputs of the predicted tokens."""
    out = np.full((len(token), *routes.shape[1:]), -1, np.int16)
    out[token >= 0] = routes[token[token >= 0] - 1]
    return out


def _bounds(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """start, start + 1, ... for each pair, one after the other."""
    return np.repeat(starts - _bounds(lengths)[:-1], lengths) + np.arange(int(lengths.sum()))


def _zigzag(cu_seqlens: np.ndarray, cp: int, cp_rank: int) -> np.ndarray:
    """Places of the pack that a context-parallel rank holds, in its order."""
    if cp == 1:
        return np.arange(int(cu_seqlens[-1]))
    chunk = np.diff(cu_seqlens) // (2 * cp)
    first = cu_seqlens[:-1] + cp_rank * chunk
    second = cu_seqlens[:-1] + (2 * cp - 1 - cp_rank) * chunk
    return _ranges(np.stack([first, second], 1).ravel(), np.repeat(chunk, 2))
