"""A graded batch in columns, as it is stored and trained on. Torch-free.

Promise (tests/unit/test_types.py): a batch holds every token of every trajectory once, with its own columns.

Shape suffixes: N tokens of all rows together, n rows; of routed experts: L layers, K experts of a token; D width.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from megatron_mopd.types import Cell, Graded, Trajectory, joined


@dataclass(frozen=True)
class Batch:
    """Rows of tokens in columns: prompt and response of each row back to back, all per-token columns of length N.

    `loss_mask` is token-aligned: True where the token was sampled by the student (or demonstrated) and is trained on.
    Log-probs are those of the token at the same index, 0 outside the mask. Columns an objective does not use are 0.
    Routed experts are those that took the token at the same index as input; -1 where none were recorded (the last token
    of a row always, which is no input), None where router replay is off. A teacher's hidden states (scores.py) are
    those that predict the token at the same index, 0 outside the mask; None where the objective needs none. So is the
    advantage of a row's outcome, which each of its tokens has.
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
    outcome_advantage: np.ndarray | None = None  # [n] float32

    def __post_init__(self) -> None:
        n, total = len(self.offsets) - 1, int(self.offsets[-1])
        if self.offsets[0] != 0 or (np.diff(self.offsets) < 0).any():
            raise ValueError("batch offsets must start at 0 and never fall")
        if len(self.cell) != n:
            raise ValueError(f"batch has {n} rows and {len(self.cell)} cell indices")
        if self.outcome_advantage is not None and len(self.outcome_advantage) != n:
            raise ValueError(f"batch has {n} rows and {len(self.outcome_advantage)} outcome advantages")
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
        advantage = None if self.outcome_advantage is None else self.outcome_advantage[picked]
        return Batch(offsets=offsets, cell=self.cell[picked], cells=self.cells, outcome_advantage=advantage, **columns)

    @classmethod
    def from_rows(
        cls,
        token_ids: Sequence[Sequence[int]],
        loss_masks: Sequence[Sequence[bool]],
        cell: Sequence[int],
        cells: Sequence[Cell],
    ) -> Batch:
        """Rows of demonstrations: nobody sampled or scored them."""
        offsets = np.cumsum([0, *map(len, token_ids)], dtype=np.int64)
        zeros = {name: np.zeros(offsets[-1], dtype) for name, dtype in TOKEN_COLUMNS.items()}
        zeros["token_ids"] = np.fromiter(chain.from_iterable(token_ids), np.int32, int(offsets[-1]))
        zeros["loss_mask"] = np.fromiter(chain.from_iterable(loss_masks), np.bool_, int(offsets[-1]))
        return cls(offsets=offsets, cell=np.asarray(cell, np.int32), cells=tuple(cells), **zeros)

    @classmethod
    def from_graded(
        cls, graded: Sequence[Graded], cells: Sequence[Cell], outcome_advantage: np.ndarray | None = None
    ) -> Batch:
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
            outcome_advantage=outcome_advantage,
            **{name: joined([row[name] for row in rows], dtype) for name, dtype in TOKEN_COLUMNS.items()},
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
