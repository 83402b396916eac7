"""Laws of packing: every row once, every token aligned, the same number of micro-batches everywhere, exact padding."""

import numpy as np
import pytest

from megatron_mopd.batch import Batch
from megatron_mopd.mcore.packing import pack, padded_length, plan
from megatron_mopd.objectives.normalisation import row_weights
from megatron_mopd.types import Cell

CELLS = (Cell("law", "low"), Cell("law", "high"))


def batch_of(lengths: list[int], seed: int = 0, prompt: int = 1) -> Batch:
    rng = np.random.default_rng(seed)
    total = sum(lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    position = np.arange(total) - np.repeat(offsets[:-1], lengths)
    return Batch(
        offsets=offsets,
        cell=rng.integers(0, 2, len(lengths)).astype(np.int32),
        token_ids=rng.integers(3, 48, total).astype(np.int32),
        loss_mask=position >= prompt,
        rollout_logprobs=-rng.random(total).astype(np.float32),
        teacher_logprobs=-rng.random(total).astype(np.float32),
        weight_version=np.zeros(total, np.int32),
        cells=CELLS,
        teacher_hidden=np.arange(total, dtype=np.float32)[:, None] + [0, 0.5],
    )


def random_lengths(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 60, rng.integers(0, 40))


@pytest.mark.parametrize("seed", range(30))
def test_plan_places_every_row_once_within_the_limit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths, multiple = random_lengths(seed), seed % 3 + 1
    dp, limit = int(rng.integers(1, 6)), int(rng.integers(20, 200))
    ranks = plan(lengths, dp, limit, multiple)
    assert len(ranks) == dp
    assert len({len(r) for r in ranks}) == 1
    assert len(ranks[0]) % multiple == 0
    assert sorted(row for r in ranks for rows in r for row in rows) == list(range(len(lengths)))
    for r in ranks:
        for rows in r:
            assert len(rows) <= 1 or lengths[rows].sum() <= limit


@pytest.mark.parametrize(
    ("rows", "dp", "per_micro_batch"), [(9, 4, 100), (3, 4, 100), (10, 3, 2), (1, 2, 1), (0, 2, 1), (864, 4, 500)]
)
def test_equal_rows_spread_so_that_counts_differ_by_at_most_one(rows: int, dp: int, per_micro_batch: int) -> None:
    ranks = plan(np.full(rows, 7), dp, 7 * per_micro_batch)
    counts = [len(micro) for r in ranks for micro in r]
    per_rank = [sum(len(micro) for micro in r) for r in ranks]
    assert max(counts) - min(counts) <= 1
    assert max(per_rank) - min(per_rank) <= 1


def test_plan_balances_tokens_over_ranks() -> None:
    lengths = np.random.default_rng(0).integers(20, 41, 864)
    tokens = [sum(int(lengths[rows].sum()) for rows in r) for r in plan(lengths, 4, 4000)]
    assert max(tokens) - min(tokens) <= 0.01 * np.mean(tokens)


def test_a_row_longer_than_the_limit_is_alone() -> None:
    ranks = plan(np.array([500, 10, 10, 10]), 1, 100)
    assert [0] in ranks[0]


@pytest.mark.parametrize("cp", [1, 2, 3])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_ranks_of_a_pack_hold_every_token_once_and_aligned(seed: int, tp: int, cp: int) -> None:
    lengths = random_lengths(seed).tolist()
    batch = batch_of(lengths, seed)
    weights = row_weights(batch.loss_tokens, "sequence")
    parts = [pack(batch, weights, tp, cp, r) for r in range(cp)]
    total = padded_length(batch.lengths, tp, cp)
    for part in parts:
        assert len(part.token) == total // cp
        assert len(part.token) % tp == 0
        assert part.cu_seqlens[-1] == total
        real = part.token >= 0
        at = part.token[real]
        row = np.searchsorted(batch.offsets, at, side="right") - 1
        np.testing.assert_array_equal(part.target_ids[real], batch.token_ids[at])
        np.testing.assert_array_equal(part.input_ids[real], batch.token_ids[at - 1])
        np.testing.assert_array_equal(part.position_ids[real], at - batch.offsets[row] - 1)
        np.testing.assert_array_equal(part.loss_mask[real], batch.loss_mask[at])
        np.testing.assert_array_equal(part.rollout_logprobs[real], batch.rollout_logprobs[at])
        np.testing.assert_array_equal(part.teacher_logprobs[real], batch.teacher_logprobs[at])
        np.testing.assert_array_equal(part.weight[real], weights[row])
        np.testing.assert_array_equal(part.cell[real], batch.cell[row])
        assert part.teacher_hidden is not None
        np.testing.assert_array_equal(part.teacher_hidden[:, 0], part.token[part.loss_mask])
        assert not part.loss_mask[~real].any()
        assert not part.weight[~real].any()
    held = np.sort(np.concatenate([part.token[part.token >= 0] for part in parts]))
    first = batch.offsets[:-1][batch.lengths > 0]
    np.testing.assert_array_equal(held, np.setdiff1d(np.arange(batch.offsets[-1]), first))


def test_zigzag_gives_a_rank_the_first_and_the_last_chunk_of_each_row() -> None:
    batch = batch_of([9, 5])
    weights = row_weights(batch.loss_tokens, "sequence")
    first, second = (pack(batch, weights, 1, 2, r) for r in range(2))
    np.testing.assert_array_equal(first.cu_seqlens, [0, 8, 12])
    np.testing.assert_array_equal(first.position_ids, [0, 1, 6, 7, 0, 3])
    np.testing.assert_array_equal(second.position_ids, [2, 3, 4, 5, 1, 2])


def test_a_pack_without_rows_is_one_dummy_sequence() -> None:
    empty = pack(batch_of([]), np.zeros(0, np.float32), 2, 2, 0)
    np.testing.assert_array_equal(empty.cu_seqlens, [0, 8])
    assert not empty.loss_mask.any()


def test_a_one_token_response_is_trained() -> None:
    part = pack(batch_of([3], prompt=2), np.ones(1, np.float32), 1, 1, 0)
    np.testing.assert_array_equal(part.loss_mask, [False, True])


def test_padding_is_never_an_end_token_that_trains() -> None:
    """Masks never compare ids: an end token (2) in the prompt, or as the last sampled one, keeps its own mask."""
    tokens = np.array([2, 9, 2, 5, 6, 2], np.int32)  # prompt [2, 9, 2], response [5, 6, 2]
    zeros = np.zeros(6, np.float32)
    mask = np.array([0, 0, 0, 1, 1, 1], bool)
    batch = Batch(np.array([0, 6]), np.zeros(1, np.int32), tokens, mask, zeros, zeros, np.zeros(6, np.int32), CELLS)
    part = pack(batch, np.ones(1, np.float32), 8, 1, 0)
    np.testing.assert_array_equal(part.target_ids, [9, 2, 5, 6, 2, 0, 0, 0])
    np.testing.assert_array_equal(part.loss_mask, [0, 0, 1, 1, 1, 0, 0, 0])


def test_selected_rows_keep_their_own_columns() -> None:
    """Balancing reorders rows; ids, tokens and scores of a row stay together."""
    batch = batch_of([9, 1, 7, 2, 5, 3])
    order = [4, 0, 2]
    part = batch.select(order)
    for i, row in enumerate(order):
        ours, theirs = slice(*part.offsets[i : i + 2]), slice(*batch.offsets[row : row + 2])
        np.testing.assert_array_equal(part.token_ids[ours], batch.token_ids[theirs])
        np.testing.assert_array_equal(part.teacher_logprobs[ours], batch.teacher_logprobs[theirs])
        assert part.cell[i] == batch.cell[row]
    np.testing.assert_array_equal(part.loss_tokens, batch.loss_tokens[order])
