"""The weight of a row's tokens in the loss, computed once over the whole batch and never per rank or micro-batch.

sequence: 1 / (rows * |y|): the mean over trajectories of the mean over their tokens (the MOPD paper's 1/|y|).
token: 1 / (sum of |y|): the mean over all trained tokens of the batch.
An 80-token and a 4-token trajectory weigh 1:1 under the first and 20:1 under the second.

|y| counts the tokens of the loss mask, also those that an objective later leaves out. A row without any (an empty
response) has no gradient, and still counts as a row of the sequence mean: dropping it would raise the weight of the
others.
"""

from __future__ import annotations

from typing import Literal

import numpy as np


def row_weights(loss_tokens: np.ndarray, normalisation: Literal["sequence", "token"]) -> np.ndarray:
    """Weight of each token of a row, [n] float32, from the trained tokens |y| of every row of the batch, [n]."""
    trained = np.maximum(loss_tokens, 1)
    if normalisation == "sequence":
        weights = 1.0 / (max(1, len(loss_tokens)) * trained)
    else:
        weights = np.full(len(loss_tokens), 1.0 / max(1, loss_tokens.sum()))
    return np.where(loss_tokens > 0, weights, 0.0).astype(np.float32)
