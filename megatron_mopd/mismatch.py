"""How far two engines are apart on the same tokens of the same weights: the numbers of tools/check_mismatch.py.

The difference of a token is d = first - second log-prob. With tokens sampled from the first engine, the mean of
e^-d - 1 + d estimates KL(first || second) and is never negative (mcore/metrics.py derives it: there m = -d).

Shape suffixes: N tokens of all rows of a batch, L layers, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron_mopd.batch import Batch
from megatron_mopd.step_metrics import NUM_QUARTERS, Mean


@dataclass(frozen=True)
class Comparison:
    """Means of |d|, in nats."""

    first: str
    second: str
    mean: Mean
    max: float
    kl: float
    """Estimate of KL(first || second) per token that was sampled."""
    quarters: tuple[Mean, ...]
    """By the quarter of its row's tokens."""
    same_routes: Mean | None
    """Tokens whose experts both engines choose, in every layer; None for a model without experts."""
    other_routes: Mean | None


@dataclass(frozen=True)
class Tokens:
    """Which tokens of a batch are compared."""

    scored_N: np.ndarray
    """bool: the responses, observations included."""
    sampled_N: np.ndarray
    """bool: what the rollout engine sampled."""
    quarter_N: np.ndarray
    same_routes_N: np.ndarray | None
    """bool: the trainer chooses the recorded experts for the token's input in every expert layer."""


def compare(logprobs: Mapping[str, np.ndarray], first: str, second: str, tokens: Tokens) -> Comparison:
    """Log-probs by name, [N]; a `sampled` one exists for sampled tokens alone."""
    chosen_N = tokens.sampled_N if "sampled" in (first, second) else tokens.scored_N
    d_N = logprobs[first].astype(np.float64) - logprobs[second]
    size_N, same_N = np.abs(d_N), tokens.same_routes_N
    sampled_d = d_N[tokens.sampled_N]
    return Comparison(
        first,
        second,
        _mean(size_N[chosen_N]),
        float(size_N[chosen_N].max(initial=0.0)),
        _mean(np.expm1(-sampled_d) + sampled_d).value,
        tuple(_mean(size_N[chosen_N & (tokens.quarter_N == i)]) for i in range(NUM_QUARTERS)),
        None if same_N is None else _mean(size_N[chosen_N & same_N]),
        None if same_N is None else _mean(size_N[chosen_N & ~same_N]),
    )


def tokens_of(batch: Batch, prompt_lengths: np.ndarray, own_NLK: np.ndarray | None) -> Tokens:
    """`own_NLK`: the experts that the trainer chooses; a layer without experts is -1 in it."""
    lengths = batch.lengths
    index_N = np.arange(len(batch.token_ids)) - np.repeat(batch.offsets[:-1] + prompt_lengths, lengths)
    response_N = np.repeat(np.maximum(1, lengths - prompt_lengths), lengths)
    same_N = None
    if own_NLK is not None:
        same_N = np.zeros(len(index_N), np.bool_)
        same_N[1:] = agreement(batch, own_NLK)[:-1].all(-1)
    return Tokens(index_N >= 0, batch.loss_mask, NUM_QUARTERS * np.maximum(0, index_N) // response_N, same_N)


def agreement(batch: Batch, own_NLK: np.ndarray) -> np.ndarray:
    """bool [N, expert layers]: an input's recorded experts are the trainer's; False where none were recorded."""
    assert batch.routed_experts is not None
    layers = (own_NLK >= 0).any((0, 2))
    recorded_NLK, own_NLK = np.sort(batch.routed_experts[:, layers]), np.sort(own_NLK[:, layers])
    return (recorded_NLK == own_NLK).all(-1) & (recorded_NLK >= 0).all(-1)


def _mean(values: np.ndarray) -> Mean:
    return Mean(float(values.mean()) if len(values) else 0.0, len(values))
