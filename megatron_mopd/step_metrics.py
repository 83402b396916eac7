"""What an update measured, per cell and of the whole step. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megatron_mopd.types import Cell

NUM_QUARTERS, NUM_DECILES = 4, 10
NUM_BUCKETS = 20
"""A row's trained tokens are told apart by position in buckets: token i of n is in bucket 20 * i // n. Five of them are
a quarter (4 * i // n), two a decile (10 * i // n)."""


NUM_AGES = 3
"""Tokens of older weights are told apart by how many versions older: 1, 2, and 3 or more."""


class Mean(NamedTuple):
    """A mean and the number of things that it is over; 0.0 of none."""

    value: float
    count: int

    @classmethod
    def over(cls, parts: Iterable[Mean]) -> Mean:
        """The mean over all things of the parts."""
        parts = list(parts)
        count = sum(part.count for part in parts)
        return cls(sum(part.value * part.count for part in parts) / max(1, count), count)


NOTHING = Mean(0.0, 0)


@dataclass(frozen=True)
class CellMetrics:
    """What one update saw of one cell. Means are over `tokens`, the trained tokens; 0.0 where there are none."""

    trajectories: int
    tokens: int
    reverse_kl: float
    """Mean of student - teacher log-probs before clipping; 0 for an objective without a teacher."""
    clip_fraction: float
    """Share of tokens whose log-ratio lies outside +-R_max."""
    entropy: float
    """Of the student over the whole vocabulary at the sampling temperature, in nats."""
    mismatch: Mean
    """|trainer - rollout| log-probs of the same weights: over the tokens that the version that was updated has sampled.
    0 for demonstrations."""
    mismatch_max: float
    masked_tokens: int
    """Tokens that were left out because the teacher's log-prob was not finite; not part of `tokens`."""
    mismatch_kl: Mean = NOTHING
    """Estimate of KL(rollout || trainer), never negative, over the tokens of `mismatch`; see mcore/metrics.py."""
    mismatch_quarters: tuple[Mean, ...] = (NOTHING,) * NUM_QUARTERS
    """`mismatch` by the quarter of its row's trained tokens that a token is in."""
    drift_by_age: tuple[Mean, ...] = (NOTHING,) * NUM_AGES
    """|trainer - rollout| log-probs of tokens that older weights have sampled, by age: what `mismatch` leaves out."""
    route_agreement: Mean = NOTHING
    """Share of (token, layer) pairs whose experts, as recorded and replayed, the trainer's router would choose too."""
    reverse_kl_deciles: tuple[Mean, ...] = (NOTHING,) * NUM_DECILES
    """Of student - teacher, by the tenth of its row's trained tokens that a token is in."""
    logit_grad_norm: float = 0.0
    """Norm of the gradient of the loss with respect to logits / temperature of its tokens. Cells share no logits,
    so their squares add up to that of the batch."""
    weight: float = 1.0
    """Factor of the cell's domain in the loss; see objectives/balance.py."""
    kl: Mean = NOTHING
    """Of an objective that compares distributions: its reverse KL over the vocabulary, not of the sampled token."""
    ratio_clipped: Mean = NOTHING
    """Share of tokens that the PPO clip left without a gradient; of no token where it is off. See objectives/ratio.py,
    also for the two that follow."""
    ratio_masked: Mean = NOTHING
    ratio_truncated: Mean = NOTHING


@dataclass(frozen=True)
class QuantizationMetrics:
    """Of the weights that are quantized."""

    error: float
    """Norm of quantized - weight, relative to the norm of the weight."""
    error_of_layer: Mapping[int, float]
    changed: float
    """Share of quantized weights that the update has changed."""
    clipped_blocks: float
    """Share of blocks that hold a weight beyond the largest number at their scale."""
    saturated: float
    """Share of weights at the largest number."""


class WeightBytes(NamedTuple):
    """Of one copy of the weights."""

    sent: int
    """As the rollout engine is given it."""
    packed: int
    """With the experts that are quantized in MXFP4 as codes and scales."""


@dataclass(frozen=True)
class StepMetrics:
    """The outcome of one `Learner.update`, the same on every rank. `step` counts from 1."""

    step: int
    loss: float
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    num_tokens: int
    """Tokens of the batch, prompts included."""
    num_micro_batches: int
    """Of each data-parallel rank."""
    cells: Mapping[Cell, CellMetrics]
    """Cells with a trajectory in the batch, in the batch's order."""
    has_teacher: bool = True
    """Log-probs of someone else were in the batch."""
    quantization: QuantizationMetrics | None = None
    """None where nothing is quantized, and where it was not measured at this step."""
    weight_bytes: WeightBytes | None = None

    @property
    def loss_tokens(self) -> int:
        return sum(c.tokens for c in self.cells.values())

    def mean(self, name: str) -> float:
        """Token mean over all cells of reverse_kl, clip_fraction or entropy."""
        total = sum(getattr(c, name) * c.tokens for c in self.cells.values())
        return total / max(1, self.loss_tokens)

    @property
    def mismatch(self) -> Mean:
        """Over all cells."""
        return Mean.over(c.mismatch for c in self.cells.values())

    @property
    def mismatch_kl(self) -> Mean:
        """Over all cells."""
        return Mean.over(c.mismatch_kl for c in self.cells.values())

    @property
    def mismatch_max(self) -> float:
        """Over all cells."""
        return max((c.mismatch_max for c in self.cells.values()), default=0.0)

    @property
    def mismatch_quarters(self) -> tuple[Mean, ...]:
        """Over all cells."""
        return tuple(Mean.over(c.mismatch_quarters[i] for c in self.cells.values()) for i in range(NUM_QUARTERS))

    @property
    def reverse_kl_deciles(self) -> tuple[Mean, ...]:
        """Over all cells."""
        return tuple(Mean.over(c.reverse_kl_deciles[i] for c in self.cells.values()) for i in range(NUM_DECILES))

    @property
    def drift_by_age(self) -> tuple[Mean, ...]:
        """Over all cells."""
        return tuple(Mean.over(c.drift_by_age[i] for c in self.cells.values()) for i in range(NUM_AGES))

    @property
    def logit_grad_norm(self) -> float:
        """Of the gradient with respect to logits / temperature of the whole batch."""
        return math.hypot(*(c.logit_grad_norm for c in self.cells.values()))

    @property
    def kl(self) -> Mean:
        """Over all cells."""
        return Mean.over(c.kl for c in self.cells.values())

    @property
    def ratio_clipped(self) -> Mean:
        """Over all cells."""
        return Mean.over(c.ratio_clipped for c in self.cells.values())

    @property
    def ratio_masked(self) -> Mean:
        """Over all cells."""
        return Mean.over(c.ratio_masked for c in self.cells.values())

    @property
    def ratio_truncated(self) -> Mean:
        """Over all cells."""
        return Mean.over(c.ratio_truncated for c in self.cells.values())

    @property
    def route_agreement(self) -> Mean:
        """Over all cells."""
        return Mean.over(c.route_agreement for c in self.cells.values())
