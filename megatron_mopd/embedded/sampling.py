"""Drawing tokens from logits with noise that belongs to a place in a trajectory.

The uniform of a token is a hash of (seed, trajectory id, absolute position of the token). It depends on nothing else:
not on the other rows of the batch, not on earlier interruptions, not on a generator's history.

    token = min { i : cdf(i) > u }          logprob = log softmax(logits / temperature)[token]

The log-prob is that of the whole distribution: top-p truncates what is drawn, not what is reported, since the trainer
and the teachers score the whole distribution too.

Promises (tests/unit/test_sampling.py): frequencies follow the probabilities; a token of probability 0, or outside the
top-p set, is never drawn. The mixer is splitmix64 (Steele, Lea and Flood, 2014).

Shape suffixes: B rows, V vocabulary.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_UNIFORM_BITS = 52  # one bit less than a double has: u * total < total also after rounding


def trajectory_key(seed: int, trajectory_id: str) -> np.uint64:
    """The key of a trajectory's noise, equal in every process."""
    digest = hashlib.blake2b(f"{seed}/{trajectory_id}".encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def position_uniforms(key_B: np.ndarray, position_B: np.ndarray) -> np.ndarray:
    """Return float64 uniforms in [0, 1), one per (key, position)."""
    x_B = key_B + (position_B.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    x_B = (x_B ^ (x_B >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x_B = (x_B ^ (x_B >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x_B ^= x_B >> np.uint64(31)
    return (x_B >> np.uint64(64 - _UNIFORM_BITS)) * 2.0**-_UNIFORM_BITS


def sample_tokens(logits_BV: Tensor, uniform_B: np.ndarray, temperature: float, top_p: float) -> tuple[Tensor, Tensor]:
    """Return the drawn tokens [B] int64 and their log-probs [B] float32 under softmax(logits / temperature)."""
    logprobs_BV = torch.log_softmax(logits_BV.float() / temperature, dim=-1)
    probs_BV, order_BV = logprobs_BV.double().exp(), None
    if top_p < 1.0:
        probs_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
        probs_BV = probs_BV * (probs_BV.cumsum(dim=-1) - probs_BV < top_p)
    cdf_BV = probs_BV.cumsum(dim=-1)
    threshold_B = torch.from_numpy(uniform_B)[:, None] * cdf_BV[:, -1:]
    token_B = torch.searchsorted(cdf_BV, threshold_B, right=True)
    # A row of NaN finds no token; its log-prob is NaN too, which the caller refuses.
    token_B = token_B.clamp_(max=logits_BV.shape[-1] - 1)
    if order_BV is not None:
        token_B = order_BV.gather(-1, token_B)
    return token_B[:, 0], logprobs_BV.gather(-1, token_B)[:, 0]
