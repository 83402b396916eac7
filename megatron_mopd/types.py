"""The types that flow round the loop. Lengths are checked where they are made; nothing is padded or trimmed to fit.

Torch-free: arrays are numpy. `Batch` is the columnar form in which a graded batch is stored and trained on.

Shape suffixes: R response tokens, N tokens of all rows together, n rows; of routed experts: P prompt tokens, c input
positions, L layers, K experts of a token.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np


class Cell(NamedTuple):
    """A (domain, effort) pair: the key of a teacher, and of every table that the project prints."""

    domain: str
    effort: str

    def __str__(self) -> str:
        return f"{self.domain}/{self.effort}"


@dataclass(frozen=True)
class Prompt:
    """One prompt as read from a file, with the effort that was drawn for it.

    Example: Prompt("gen-17", "general", "low", "sums", messages=({"role": "user", "content": "1 + 1"},), label="2")
    """

    id: str
    domain: str
    effort: str
    environment: str
    messages: tuple[Mapping[str, Any], ...]
    label: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cell(self) -> Cell:
        return Cell(self.domain, self.effort)


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt as token ids: the student reads the effort level, the teacher of the cell does not (eq. 15)."""

    prompt: Prompt
    student_ids: tuple[int, ...]
    teacher_ids: tuple[int, ...]


@dataclass(frozen=True)
class Segment:
    """One uninterrupted stretch of sampling (mask 1, with log-probs), or an observation (mask 0, log-probs 0).

    `routed_experts` (router replay) are the experts that the rollout engine chose for the c input positions from the
    first one that no earlier segment covers up to the one that gave this segment's last token: int16 [c, L, K], with L
    all layers of the model, dense ones included (whose entries mean nothing). For the first segment of n tokens after
    a prompt of P, c = P + n - 1. None where nothing was recorded or sampled: such a segment covers nothing.

    Example: Segment.observation([7, 8]) masks two tokens that a tool returned.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    loss_mask: tuple[bool, ...]
    weight_version: int
    finish_reason: str = "stop"  # stop | length | abort | observation
    routed_experts: np.ndarray | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logprobs) == len(self.loss_mask):
            raise ValueError(
                f"segment has {len(self.token_ids)} token ids, {len(self.logprobs)} log-probs "
                f"and {len(self.loss_mask)} masks"
            )
        routes = self.routed_experts
        if routes is not None and (routes.ndim != 3 or routes.dtype != np.int16):
            raise ValueError(f"routed experts must be int16 [c, layers, top-k], not {routes.dtype} {routes.shape}")

    @classmethod
    def observation(cls, token_ids: Sequence[int], weight_version: int = 0) -> Segment:
        n = len(token_ids)
        return cls(tuple(token_ids), (0.0,) * n, (False,) * n, weight_version, "observation")


@dataclass(frozen=True)
class Outcome:
    """What the environment's verifier says: `reward` of the answer alone, and the tokens spent against the budget."""

    reward: float
    spent_tokens: int
    budget_tokens: int

    @property
    def reward_within_budget(self) -> float:
        return self.reward if self.spent_tokens <= self.budget_tokens else 0.0


@dataclass(frozen=True)
class Trajectory:
    """The append-only token log of one sample. `id` is stable over interruptions."""

    id: str
    prompt: RenderedPrompt
    segments: tuple[Segment, ...]
    finish_reason: str  # stop | length
    outcome: Outcome | None = None

    @property
    def response_ids(self) -> np.ndarray:
        """Sampled and observed tokens, [R] int32."""
        return _joined([np.asarray(s.token_ids, np.int32) for s in self.segments], np.int32)

    @property
    def rollout_logprobs(self) -> np.ndarray:
        """[R] float32."""
        return _joined([np.asarray(s.logprobs, np.float32) for s in self.segments], np.float32)

    @property
    def loss_mask(self) -> np.ndarray:
        """[R] bool."""
        return _joined([np.asarray(s.loss_mask, np.bool_) for s in self.segments], np.bool_)

    @property
    def weight_versions(self) -> np.ndarray:
        """[R] int32."""
        return _joined([np.full(len(s.token_ids), s.weight_version, np.int32) for s in self.segments], np.int32)

    @property
    def routed_experts(self) -> np.ndarray | None:
        """The experts of the first input positions, each once, [<= P + R - 1, L, K] int16; None where none were
        recorded.

        Every segment's routes count, not only the last one's. Raises ValueError where a segment covers other positions
        than it must (see Segment).
        """
        if all(s.routed_experts is None for s in self.segments):
            return None
        end, covered, parts = len(self.prompt.student_ids), 0, []
        for segment in self.segments:
            end += len(segment.token_ids)
            if segment.routed_experts is None:
                continue  # the next that has routes begins where the last one ended
            want = end - 1 - covered if any(segment.loss_mask) else 0
            if len(segment.routed_experts) != want:
                raise ValueError(
                    f"a segment of {self.id} has routed experts of {len(segment.routed_experts)} positions instead of "
                    f"{want}: {covered} to {covered + want} of its {end} tokens"
                )
            parts.append(segment.routed_experts)
            covered += want
        return np.concatenate(parts)


@dataclass(frozen=True)
class Graded:
    """A trajectory with one log-probability per response token from the teacher of its cell, and its hidden states if
    the objective needs them."""

    trajectory: Trajectory
    teacher: str
    teacher_logprobs: np.ndarray  # [R] float32
    teacher_hidden: np.ndarray | None = field(default=None, compare=False, repr=False)  # [R, D], see scores.py

    def __post_init__(self) -> None:
        want = len(self.trajectory.response_ids)
        for what, column in (("log-probs", self.teacher_logprobs), ("hidden states", self.teacher_hidden)):
            if column is not None and len(column) != want:
                raise ValueError(
                    f"teacher {self.teacher} returned {len(column)} {what} for the {want} response tokens "
                    f"of {self.trajectory.id}"
                )


@dataclass(frozen=True)
class Batch:
    """Rows of tokens in columns: prompt and response of each row back to back, all per-token columns of length N.

    `loss_mask` is token-aligned: True where the token was sampled by the student (or demonstrated) and is trained on.
    Log-probs are those of the token at the same index, 0 outside the mask. Columns an objective does not use are 0.
    Routed experts are those that took the token at the same index as input; -1 where none were recorded (the last token
    of a row always, which is no input), None where router replay is off. A teacher's hidden states (scores.py) are
    those that predict the token at the same index, 0 outside the mask; None where the objective needs none.
    """

    offsets: np.ndarray  # [n + 1] int64
    cell: np.ndarray  # [n] int32, index into `cells`
    token_ids: np.ndarray  # [N] int32
    loss_mask: np.ndarray  # [N] bool
    rollout_logprobs: np.ndarray  # [N] float32
    teacher_logprobs: np.ndarray  # [N] float32
    weight_version: np.ndarray  # [N] int32
    cells: tuple[Cell, ...]
    routed_experts: np.ndarray | None = None  # [N, L, K] int16
    teacher_hidden: np.ndarray | None = None  # [N, D] uint16 (the bits of bfloat16) or float32

    def __post_init__(self) -> None:
        n, total = len(self.offsets) - 1, int(self.offsets[-1])
        if self.offsets[0] != 0 or (np.diff(self.offsets) < 0).any():
            raise ValueError("batch offsets must start at 0 and never fall")
        if len(self.cell) != n:
            raise ValueError(f"batch has {n} rows and {len(self.cell)} cell indices")
        for name, column in self.token_columns.items():
            if len(column) != total:
                raise ValueError(f"batch column {name} has {len(column)} entries for {total} tokens")

    def __len__(self) -> int:
        return len(self.cell)

    @property
    def token_columns(self) -> dict[str, np.ndarray]:
        """The columns that have an entry for each token, by name."""
        columns = {name: getattr(self, name) for name in (*TOKEN_COLUMNS, *OPTIONAL_COLUMNS)}
        return {name: column for name, column in columns.items() if column is not None}

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, prompt included, [n]."""
        return np.diff(self.offsets)

    @property
    def loss_tokens(self) -> np.ndarray:
        """Trained tokens |y| of each row, [n]. The first token of a row has no context and never counts."""
        before = np.concatenate([[0], np.cumsum(self.loss_mask)])
        return before[self.offsets[1:]] - before[np.minimum(self.offsets[:-1] + 1, self.offsets[1:])]

    @property
    def advantage_sums(self) -> np.ndarray:
        """Number, sum and sum of squares of the advantages teacher - rollout of a row's trained tokens, [n, 3] float64;
        without those of which one is not finite."""
        known = self.loss_mask & np.isfinite(self.teacher_logprobs) & np.isfinite(self.rollout_logprobs)
        known[self.offsets[:-1][self.lengths > 0]] = False  # see loss_tokens
        row = np.repeat(np.arange(len(self)), self.lengths)[known]
        advantage = self.teacher_logprobs[known].astype(np.float64) - self.rollout_logprobs[known]
        powers = (np.ones_like(advantage), advantage, np.square(advantage))
        return np.stack([np.bincount(row, power, len(self)) for power in powers], axis=1)

    def select(self, rows: Sequence[int], optional: Collection[str] | None = None) -> Batch:
        """The given rows, in the given order; of the optional columns those that are named (None: all)."""
        picked = np.asarray(rows, np.int64)
        lengths = self.lengths[picked]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        tokens = np.repeat(self.offsets[picked] - offsets[:-1], lengths) + np.arange(offsets[-1])
        wanted = {*TOKEN_COLUMNS, *(OPTIONAL_COLUMNS if optional is None else optional)}
        columns = {name: column[tokens] for name, column in self.token_columns.items() if name in wanted}
        return Batch(offsets=offsets, cell=self.cell[picked], cells=self.cells, **columns)

    @classmethod
    def from_graded(cls, graded: Sequence[Graded], cells: Sequence[Cell]) -> Batch:
        """One row per trajectory, in order: the student's prompt, then the response.

        The teacher scored every response token, observations included; outside the mask its scores are dropped here.
        Raises ValueError for a trajectory of a cell that is not among `cells`.
        """
        index = {cell: i for i, cell in enumerate(cells)}
        rows = [_row(g) for g in graded]
        unknown = [g for g in graded if g.trajectory.prompt.prompt.cell not in index]
        if unknown:
            t = unknown[0].trajectory
            raise ValueError(f"trajectory {t.id} is of {t.prompt.prompt.cell}, which is not a cell of this batch")
        return cls(
            offsets=np.cumsum([0, *(len(row["token_ids"]) for row in rows)], dtype=np.int64),
            cell=np.array([index[g.trajectory.prompt.prompt.cell] for g in graded], np.int32),
            cells=tuple(cells),
            routed_experts=_joined_routes([g.trajectory for g in graded]),
            teacher_hidden=_joined_hidden(graded),
            **{name: _joined([row[name] for row in rows], dtype) for name, dtype in TOKEN_COLUMNS.items()},
        )


TOKEN_COLUMNS: Mapping[str, type] = {
    "token_ids": np.int32,
    "loss_mask": np.bool_,
    "rollout_logprobs": np.float32,
    "teacher_logprobs": np.float32,
    "weight_version": np.int32,
}
"""The per-token columns of a Batch and how they are stored."""
OPTIONAL_COLUMNS = ("routed_experts", "teacher_hidden")
"""Those that a Batch may have besides."""


def _row(graded: Graded) -> dict[str, np.ndarray]:
    """The columns of one trajectory: zeros over the prompt, then the response."""
    t = graded.trajectory
    prompt_ids = np.asarray(t.prompt.student_ids, np.int32)
    response = {
        "loss_mask": t.loss_mask,
        "rollout_logprobs": np.where(t.loss_mask, t.rollout_logprobs, 0.0),
        "teacher_logprobs": np.where(t.loss_mask, graded.teacher_logprobs, 0.0),
        "weight_version": t.weight_versions,
    }
    columns = {name: np.concatenate([np.zeros(len(prompt_ids), c.dtype), c]) for name, c in response.items()}
    return {"token_ids": np.concatenate([prompt_ids, t.response_ids]), **columns}


def _joined_routes(trajectories: Sequence[Trajectory]) -> np.ndarray | None:
    """The column routed_experts; ValueError where a trajectory with sampled tokens has no routes and others have."""
    recorded = [t.routed_experts for t in trajectories]
    shapes = {routes.shape[1:] for routes in recorded if routes is not None}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise ValueError(f"routed experts differ in layers x top-k: {sorted(shapes)}")
    rows = []
    for t, routes in zip(trajectories, recorded, strict=True):
        if routes is None and t.loss_mask.any():
            raise ValueError(f"{t.id} has no routed experts, and other trajectories have")
        row = np.full((len(t.prompt.student_ids) + len(t.response_ids), *next(iter(shapes))), -1, np.int16)
        if routes is not None:
            row[: len(routes)] = routes
        rows.append(row)
    return np.concatenate(rows)


def _joined_hidden(graded: Sequence[Graded]) -> np.ndarray | None:
    """The column teacher_hidden; ValueError where a trajectory has none and others have, or another kind."""
    scored = [g for g in graded if len(g.teacher_logprobs)]
    states = [g.teacher_hidden for g in scored if g.teacher_hidden is not None]
    if not states:
        return None
    kinds = {(hidden.dtype.name, hidden.shape[1]) for hidden in states}
    if len(kinds) > 1 or len(states) < len(scored):
        raise ValueError(
            f"{len(states)} of {len(scored)} trajectories have teacher's hidden states, of {sorted(kinds)}"
        )
    rows = []
    for g in graded:
        mask = np.concatenate([np.zeros(len(g.trajectory.prompt.student_ids), bool), g.trajectory.loss_mask])
        row = np.zeros((len(mask), states[0].shape[1]), states[0].dtype)
        if g.teacher_hidden is not None and len(g.teacher_hidden):
            row[mask] = g.teacher_hidden[g.trajectory.loss_mask]
        rows.append(row)
    return np.concatenate(rows)


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts, dtype=dtype, casting="same_kind") if parts else np.zeros(0, dtype)


NUM_QUARTERS, NUM_DECILES = 4, 10
NUM_BUCKETS = 20
"""A row's trained tokens are told apart by position in buckets: token i of n is in bucket 20 * i // n. Five of them are
a quarter (4 * i // n), two a decile (10 * i // n)."""


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
    def logit_grad_norm(self) -> float:
        """Of the gradient with respect to logits / temperature of the whole batch."""
        return math.hypot(*(c.logit_grad_norm for c in self.cells.values()))

    @property
    def kl(self) -> Mean:
        """Over all cells."""
        return Mean.over(c.kl for c in self.cells.values())

    @property
    def route_agreement(self) -> Mean:
        """Over all cells."""
        return Mean.over(c.route_agreement for c in self.cells.values())
