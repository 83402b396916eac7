"""Rows in one array are the rows of plain lists, whatever is asked of them."""

from __future__ import annotations

from itertools import accumulate
from random import Random

import numpy as np
import pytest

from megatron_mopd.token_rows import TokenRows

Row = tuple[list[int], list[int]]


def some_rows(rng: Random) -> list[Row]:
    """At times none, at times with nothing in them."""

    def tokens() -> list[int]:
        return [rng.choice((0, 7, (1 << 31) - 1)) for _ in range(rng.choice((0, 0, 1, 4)))]

    return [(tokens(), tokens()) for _ in range(rng.randrange(7))]


SOME = [some_rows(Random(seed)) for seed in range(40)]
assert any(not rows for rows in SOME)


def made(rows: list[Row]) -> TokenRows:
    return TokenRows.of([prompt for prompt, _ in rows], [response for _, response in rows])


def plain(rows: TokenRows) -> list[Row]:
    assert rows.token_ids.dtype == np.int32
    assert rows.prompt_lengths.dtype == rows.response_lengths.dtype == np.int64
    assert len(rows.token_ids) == rows.lengths.sum()
    return [(prompt.tolist(), response.tolist()) for prompt, response in rows]


@pytest.mark.parametrize("rows", SOME)
def test_rows_are_what_they_were_made_of(rows: list[Row]) -> None:
    got = made(rows)
    assert plain(got) == rows
    assert len(got) == len(rows)
    assert got.ends.tolist() == list(accumulate(len(p) + len(r) for p, r in rows))
    assert [got.begin(i) for i in range(len(rows) + 1)] == [0, *got.ends.tolist()]
    assert got.num_response_tokens == sum(len(r) for _, r in rows)
    assert plain(got.with_response()) == [row for row in rows if row[1]]


@pytest.mark.parametrize("rows", SOME)
def test_every_token_knows_its_row_and_its_part(rows: list[Row]) -> None:
    got = made(rows)
    tokens = [(i, part) for i, row in enumerate(rows) for part in (0, 1) for _ in row[part]]
    assert got.row_of_token.tolist() == [i for i, _ in tokens]
    assert got.is_response.tolist() == [part == 1 for _, part in tokens]
    responses = [i for i, part in tokens if part == 1]
    assert [got.row_of_response_token(k) for k in range(len(responses))] == responses


@pytest.mark.parametrize("rows", SOME)
def test_parts_are_slices_and_join_to_the_whole(rows: list[Row]) -> None:
    rng = Random(len(rows))
    cuts = sorted(rng.randrange(len(rows) + 1) for _ in range(3))
    bounds = list(zip([0, *cuts], [*cuts, len(rows)], strict=True))
    parts = [made(rows).cut(first, last) for first, last in bounds]
    assert [plain(part) for part in parts] == [rows[first:last] for first, last in bounds]
    assert plain(TokenRows.joined(parts)) == rows
    assert plain(TokenRows.joined(parts).cut(*bounds[1])) == plain(parts[1])
