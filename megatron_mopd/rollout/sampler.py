"""SAMPLE: the student's own trajectories, one task each: generate, let the environment answer, append, go on.

    segments = [ sampled (mask 1) | observed (mask 0) | sampled | ... ]

Promises (tests/unit/test_sampler.py): tokens are appended, never re-tokenized, trimmed or padded; sampled and observed
tokens together never exceed `max_response_tokens`, and every request asks only for what is left; trajectories are
yielded in the order in which they finish, which follows from tokens alone if the engine's order does and environments
answer at once. A trajectory that was interrupted asks for the rest of its budget, and its environment is asked about
whole stretches.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

import numpy as np

from megatron_mopd.errors import UserError
from megatron_mopd.protocols import Environment, Resumable, RolloutEngine, SampleRequest
from megatron_mopd.rollout.budget import budget_tokens
from megatron_mopd.rollout.environments import MakeEnvironment
from megatron_mopd.types import Cell, Outcome, RenderedPrompt, Segment, Trajectory


class EnvironmentFailed(UserError):
    """An environment raised or broke its protocol; the message names the trajectory and the environment, the cause is
    chained."""


@dataclass(frozen=True)
class Sampling:
    """What turns prompts into trajectories."""

    engine: RolloutEngine
    environments: Mapping[str, MakeEnvironment]
    max_response_tokens: int
    vocab_size: int
    max_tokens: int
    """Prompt and response together: what the student has positions for."""
    taus: Mapping[Cell, float] = field(default_factory=dict)
    """Of a cell's budgets, see budget.py; a cell without has none."""


async def sample(
    prompts: Sequence[RenderedPrompt], sampling: Sampling, suffix: str, samples_per_prompt: int = 1
) -> AsyncIterator[Trajectory]:
    """Sample each prompt `samples_per_prompt` times; yield each trajectory as it finishes.

    The trajectories of prompts[i] are group i, and the k-th of all is named "{k}/{prompt id}{suffix}". The noise of its
    tokens depends on this name, so the suffix must tell steps apart; the index tells apart samples of one prompt, and
    prompts that are drawn more than once.

    Raises EnvironmentFailed, or whatever the engine raises; the other trajectories are cancelled then.
    """
    makers = [environment_of(prompt, sampling.environments) for prompt in prompts]
    wanted = [
        (group, prompt, make)
        for group, (prompt, make) in enumerate(zip(prompts, makers, strict=True))
        for _ in range(samples_per_prompt)
    ]
    tasks = [
        asyncio.create_task(_roll_out(Rollout(f"{k}/{prompt.prompt.id}{suffix}", prompt, make), group, sampling))
        for k, (group, prompt, make) in enumerate(wanted)
    ]
    try:
        for finished in asyncio.as_completed(tasks):
            yield await finished
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def environment_of(prompt: RenderedPrompt, environments: Mapping[str, MakeEnvironment]) -> MakeEnvironment:
    name = prompt.prompt.environment
    if name not in environments:
        raise UserError(f"prompt {prompt.prompt.id} wants environment {name!r}; add it under environments:")
    return environments[name]


async def _roll_out(rollout: Rollout, group: int, sampling: Sampling) -> Trajectory:
    trajectory = await rollout.go_on(sampling, Gate())
    assert trajectory is not None, "the gate was open"
    return replace(trajectory, group=group)


@dataclass
class Gate:
    """Closed, it sends every trajectory home before its next request. It counts interruptions by reason."""

    is_open: bool = True
    interrupted: Counter[str] = field(default_factory=Counter)
    """pause: a request was cut. unstarted: nor had it a token. turn: between two requests. engine: the engine cut it,
    and it went on at once."""


class Rollout:
    """A trajectory on its way: its token log, and its environment. It may be left between any two requests."""

    def __init__(
        self,
        trajectory_id: str,
        prompt: RenderedPrompt,
        make: MakeEnvironment,
        segments: Sequence[Segment] = (),
        observed: int = 0,
        state: dict[str, Any] | None = None,
    ):
        """`observed`: tokens of the response that the environment has seen, or has said. `state`: its snapshot then,
        for one that an earlier process began."""
        self.id, self.prompt = trajectory_id, prompt
        self.segments, self.observed = list(segments), observed
        self.environment: Environment | None = None
        self.trajectory: Trajectory | None = None
        """Once it is finished."""
        self._make, self._state = make, state
        self._blame = _Blame(f"environment {prompt.prompt.environment!r} of trajectory {trajectory_id} failed")

    @property
    def begun_at(self) -> int | None:
        """Weight version of its first tokens."""
        return self.segments[0].weight_version if self.segments else None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt.student_ids) + sum(len(s.token_ids) for s in self.segments)

    async def go_on(self, sampling: Sampling, gate: Gate) -> Trajectory | None:
        """Until it is finished, or None once the gate is closed."""
        environment = await self._environment()
        finish_reason = await self._converse(environment, sampling, gate)
        if finish_reason is None:
            return None
        trajectory = Trajectory(self.id, self.prompt, tuple(self.segments), finish_reason)
        with self._blame:
            outcome = _checked_outcome(await environment.score(trajectory))
        budget = budget_tokens(self.prompt.prompt, sampling.taus)
        self.trajectory = replace(trajectory, outcome=replace(outcome, budget_tokens=budget))
        return self.trajectory

    async def snapshot(self) -> dict[str, Any] | None:
        """Of the environment, while nothing goes on; None where there is none yet."""
        if self.environment is None:
            return self._state
        with self._blame:
            state = await _resumable(self.environment).snapshot()
            if not isinstance(state, dict) or json.loads(json.dumps(state)) != state:
                raise ValueError(f"snapshot must return a dict that JSON can hold, not {state!r}")
        return state

    async def _environment(self) -> Environment:
        if self.environment is None:
            with self._blame:
                environment = self._make(self.prompt.prompt)
                if self._state is not None:
                    await _resumable(environment).restore(self._state)
            self.environment = environment
        return self.environment

    async def _converse(self, environment: Environment, sampling: Sampling, gate: Gate) -> str | None:
        """Alternate sampling and observing until the environment is done ("stop"), the budget is spent ("length") or
        the gate is closed (None)."""
        token_ids = self.prompt.student_ids + sum((s.token_ids for s in self.segments), ())
        routed = sum(len(s.routed_experts) for s in self.segments if s.routed_experts is not None)
        first = len(self.prompt.student_ids)
        most = first + sampling.max_response_tokens
        self._check_room(sampling)
        with self._blame:
            _check_token_ids(environment.stop_token_ids, sampling.vocab_size)
        while len(token_ids) < most:
            if not gate.is_open:
                gate.interrupted["turn"] += 1
                return None
            request = SampleRequest(
                self.id, token_ids, most - len(token_ids), environment.stop_token_ids, routed, self.begun_at
            )
            segment = await sampling.engine.generate(request)
            if segment.token_ids:
                self.segments.append(segment)
            token_ids += segment.token_ids
            routed += 0 if segment.routed_experts is None else len(segment.routed_experts)
            if segment.finish_reason == "abort":
                if gate.is_open:
                    gate.interrupted["engine"] += 1
                    continue  # perhaps by new weights: it goes on from here
                gate.interrupted["pause" if self.segments else "unstarted"] += 1
                return None
            if segment.finish_reason == "length":
                break
            with self._blame:
                observation = await environment.step(token_ids[first + self.observed :])
                _check_token_ids(observation.token_ids, sampling.vocab_size)
            if len(token_ids) + len(observation.token_ids) > most:
                break  # nothing could be sampled after it: it is left out whole, rather than cut
            if observation.token_ids:
                self.segments.append(Segment.observation(observation.token_ids, segment.weight_version))
                token_ids += observation.token_ids
            self.observed = len(token_ids) - first
            if observation.done:
                return "stop"
        return "length"

    def _check_room(self, sampling: Sampling) -> None:
        tokens = len(self.prompt.student_ids)
        if tokens + sampling.max_response_tokens > sampling.max_tokens:
            raise UserError(
                f"prompt {self.prompt.prompt.id} of {tokens} tokens and rollout.max_response_tokens="
                f"{sampling.max_response_tokens} exceed the student's max_position_embeddings ({sampling.max_tokens}); "
                "remove the prompt or lower the option"
            )


def _resumable(environment: Environment) -> Resumable:
    if not isinstance(environment, Resumable):
        raise ValueError("it has no snapshot and restore, which rollout.partial needs (protocols.Resumable)")
    return environment


def _check_token_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    for token in token_ids:
        if not isinstance(token, int | np.integer) or not 0 <= token < vocab_size:
            raise ValueError(f"{token!r} is not a token id of the student, whose vocabulary has {vocab_size}")


def _checked_outcome(outcome: Outcome) -> Outcome:
    """With Python's own numbers, whichever the environment's are: they are written as JSON."""
    if not isinstance(outcome, Outcome) or not math.isfinite(outcome.reward):
        raise ValueError(f"score must return an Outcome with a finite reward, not {outcome!r}")
    if not isinstance(outcome.spent_tokens, Integral) or outcome.spent_tokens < 0:
        raise ValueError(f"score must return an Outcome with a count of spent tokens, not {outcome!r}")
    if outcome.budget_tokens is not None:
        raise ValueError("the budget is not the environment's: it is the prompt's budget_tokens times budgets.tau")
    return Outcome(float(outcome.reward), int(outcome.spent_tokens))


class _Blame:
    """Any exception of the environment's code leaves as EnvironmentFailed, whatever its type; sys.exit() too, which
    would end the driver without a word."""

    def __init__(self, message: str):
        self._message = message

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception | SystemExit):
            kind_of = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            raise EnvironmentFailed(f"{self._message}: {kind_of}{error}") from error
