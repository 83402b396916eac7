"""What a teacher says of a response: log-probs and, for objectives over whole distributions, its last hidden states.

They are those that its output layer reads: the learner applies that layer itself, so a token costs D numbers on the
wire, and not V. They travel in the precision in which the teacher computed; numpy has no bfloat16, so there are its
bits instead. Torch-free.

Shape suffixes: R response tokens, D width.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

HIDDEN_DTYPES = (np.dtype(np.uint16), np.dtype(np.float32))
"""bfloat16 as its bits, and float32."""
_BF16_EXPONENT = 0x7F80


class Scores(NamedTuple):
    """Of one response."""

    logprobs: np.ndarray
    """[R] float32."""
    hidden: np.ndarray | None = None
    """[R, D], where they were asked for: at each token the state that predicts it."""

    @property
    def nbytes(self) -> int:
        return self.logprobs.nbytes + (0 if self.hidden is None else self.hidden.nbytes)


def problem_of_hidden(hidden: np.ndarray | None, num_tokens: int) -> str | None:
    """Why these are no hidden states of so many response tokens."""
    if hidden is None:
        return "no hidden states"
    if hidden.ndim != 2 or len(hidden) != num_tokens or hidden.dtype not in HIDDEN_DTYPES:
        return f"{hidden.dtype} hidden states of shape {list(hidden.shape)} for {num_tokens} response tokens"
    if not is_finite(hidden):
        return "a hidden state that is not finite"
    return None


def is_finite(hidden: np.ndarray) -> bool:
    if hidden.dtype == np.uint16:
        return not ((hidden & _BF16_EXPONENT) == _BF16_EXPONENT).any()
    return bool(np.isfinite(hidden).all())
