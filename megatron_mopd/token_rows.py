"""Rows of tokens that a teacher scores, each a prompt and a response, back to back in one array.

A batch of a lane has hundreds of short rows: whatever is done row by row in Python costs more than the forward pass of
a small teacher, so that nothing on the way from the client to the ranks looks at a single row. Torch-free.

Shape suffixes: N tokens of all rows, n rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

Tokens = Sequence[int] | np.ndarray


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Example: TokenRows.of([[7, 8]], [[9]]) is one row, whose token 9 is to be scored."""

    token_ids: np.ndarray
    """[N] int32: prompt, response, prompt, ..."""
    prompt_lengths: np.ndarray  # [n] int64
    response_lengths: np.ndarray  # [n] int64

    @classmethod
    def of(cls, prompts: Sequence[Tokens], responses: Sequence[Tokens]) -> Self:
        token_ids = [token for pair in zip(prompts, responses, strict=True) for part in pair for token in part]
        return cls(np.array(token_ids, np.int32), _lengths(prompts), _lengths(responses))

    @classmethod
    def joined(cls, parts: Sequence[TokenRows]) -> Self:
        """At least one part."""
        names = ("token_ids", "prompt_lengths", "response_lengths")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    def cut(self, first: int, last: int) -> TokenRows:
        """The rows [first, last)."""
        if (first, last) == (0, len(self)):
            return self
        tokens = slice(self.begin(first), self.begin(last))
        return TokenRows(self.token_ids[tokens], self.prompt_lengths[first:last], self.response_lengths[first:last])

    def begin(self, row: int) -> int:
        """Tokens before it."""
        return int(self.ends[row - 1]) if row else 0

    @property
    def lengths(self) -> np.ndarray:
        """Of prompt and response together, [n]."""
        return self.prompt_lengths + self.response_lengths

    @cached_property
    def ends(self) -> np.ndarray:
        """Tokens up to and including each row, [n]."""
        return np.cumsum(self.lengths)

    @property
    def row_of_token(self) -> np.ndarray:
        """[N]"""
        return np.repeat(np.arange(len(self)), self.lengths)

    @property
    def is_response(self) -> np.ndarray:
        """[N] bool."""
        part_lengths = np.stack([self.prompt_lengths, self.response_lengths], axis=1).reshape(-1)
        return np.repeat(np.arange(2 * len(self)) % 2 == 1, part_lengths)

    @property
    def num_response_tokens(self) -> int:
        return int(self.response_lengths.sum())

    def row_of_response_token(self, index: int) -> int:
        """Which row has the response token with this index among those of all rows."""
        return int(np.searchsorted(np.cumsum(self.response_lengths), index, side="right"))

    def with_response(self) -> TokenRows:
        """Without the rows that have none."""
        if self.response_lengths.all():
            return self
        wanted = self.response_lengths > 0
        token_ids = self.token_ids[np.repeat(wanted, self.lengths)]
        return TokenRows(token_ids, self.prompt_lengths[wanted], self.response_lengths[wanted])

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Prompt and response of each row, for whoever wants to look at single rows."""
        for end, length, prompt_length in zip(self.ends, self.lengths, self.prompt_lengths, strict=True):
            prompt, response = np.split(self.token_ids[end - length : end], [prompt_length])
            yield prompt, response


def _lengths(rows: Sequence[Tokens]) -> np.ndarray:
    return np.array([len(row) for row in rows], np.int64)
