"""The types that flow round the loop. Lengths are checked where they are made; nothing is padded or trimmed to fit.

Torch-free: arrays are numpy. What is trained on is in batch.py, what an update measured in step_metrics.py.

Shape suffixes: R response tokens; of routed experts: P prompt tokens, c input positions, L layers, K experts of a
token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    budget_tokens: float | None = None
    """b0(x): what the problem takes, in tokens that count as spent; a trajectory may spend tau times as many. None: no
    budget."""

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
    kv_version: int | None = None
    """The oldest weights whose keys and values its tokens attended to, kept over new ones; None: its own alone."""

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
    """What the environment's verifier says: `reward` of the answer alone, and the tokens spent. The sampler adds the
    budget, tau * b0(x), which is no environment's business; None: there is none."""

    reward: float
    spent_tokens: int
    budget_tokens: float | None = None

    @property
    def is_within_budget(self) -> bool:
        return self.budget_tokens is None or self.spent_tokens <= self.budget_tokens

    @property
    def reward_within_budget(self) -> float:
        """The score of an evaluation. Training rewards with another rule: see objectives/advantages.py."""
        return self.reward if self.is_within_budget else 0.0


@dataclass(frozen=True)
class Trajectory:
    """The append-only token log of one sample. `id` is stable over interruptions; `group` tells which of the prompts
    drawn in its step it is a sample of."""

    id: str
    prompt: RenderedPrompt
    segments: tuple[Segment, ...]
    finish_reason: str  # stop | length
    outcome: Outcome | None = None
    group: int = 0

    @property
    def response_ids(self) -> np.ndarray:
        """Sampled and observed tokens, [R] int32."""
        return joined([np.asarray(s.token_ids, np.int32) for s in self.segments], np.int32)

    @property
    def rollout_logprobs(self) -> np.ndarray:
        """[R] float32."""
        return joined([np.asarray(s.logprobs, np.float32) for s in self.segments], np.float32)

    @property
    def loss_mask(self) -> np.ndarray:
        """[R] bool."""
        return joined([np.asarray(s.loss_mask, np.bool_) for s in self.segments], np.bool_)

    @property
    def weight_versions(self) -> np.ndarray:
        """[R] int32."""
        return joined([np.full(len(s.token_ids), s.weight_version, np.int32) for s in self.segments], np.int32)

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


def joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    """One after the other; of no parts an empty column."""
    return np.concatenate(parts, dtype=dtype, casting="same_kind") if parts else np.zeros(0, dtype)
