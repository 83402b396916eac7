"""SAMPLE: the student's own trajectories, one task each: generate, let the environment answer, append, go on.

    segments = [ sampled (mask 1) | observed (mask 0) | sampled | ... ]

Promises (tests/unit/test_sampler.py): tokens are appended, never re-tokenized, trimmed or padded; sampled and observed
tokens together never exceed `max_response_tokens`, and every request asks only for what is left; trajectories are
yielded in the order in which they finish, which follows from tokens alone if the engine's order does and environments
answer at once.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral

import numpy as np

from megatron_mopd.errors import UserError
from megatron_mopd.protocols import Environment, RolloutEngine, SampleRequest
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
    makers = [_environment_of(prompt, sampling.environments) for prompt in prompts]
    wanted = [
        (group, prompt, make)
        for group, (prompt, make) in enumerate(zip(prompts, makers, strict=True))
        for _ in range(samples_per_prompt)
    ]
    tasks = [
        asyncio.create_task(_roll_out(f"{k}/{prompt.prompt.id}{suffix}", group, prompt, make, sampling))
        for k, (group, prompt, make) in enumerate(wanted)
    ]
    try:
        for finished in asyncio.as_completed(tasks):
            yield await finished
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _environment_of(prompt: RenderedPrompt, environments: Mapping[str, MakeEnvironment]) -> MakeEnvironment:
    name = prompt.prompt.environment
    if name not in environments:
        raise UserError(f"prompt {prompt.prompt.id} wants environment {name!r}; add it under environments:")
    return environments[name]


async def _roll_out(
    trajectory_id: str, group: int, prompt: RenderedPrompt, make: MakeEnvironment, sampling: Sampling
) -> Trajectory:
    blame = _Blame(f"environment {prompt.prompt.environment!r} of trajectory {trajectory_id} failed")
    with blame:
        environment = make(prompt.prompt)
    segments, finish_reason = await _converse(trajectory_id, prompt, environment, sampling, blame)
    trajectory = Trajectory(trajectory_id, prompt, tuple(segments), finish_reason, group=group)
    with blame:
        outcome = _checked_outcome(await environment.score(trajectory))
    budget = budget_tokens(prompt.prompt, sampling.taus)
    return replace(trajectory, outcome=replace(outcome, budget_tokens=budget))


async def _converse(
    trajectory_id: str, prompt: RenderedPrompt, environment: Environment, sampling: Sampling, blame: _Blame
) -> tuple[list[Segment], str]:
    """Alternate sampling and observing until the environment is done ("stop") or the budget is spent ("length")."""
    token_ids, unobserved, routed, segments = prompt.student_ids, (), 0, []
    most = len(token_ids) + sampling.max_response_tokens
    if most > sampling.max_tokens:
        raise UserError(
            f"prompt {prompt.prompt.id} of {len(token_ids)} tokens and rollout.max_response_tokens="
            f"{sampling.max_response_tokens} exceed the student's max_position_embeddings ({sampling.max_tokens}); "
            "remove the prompt or lower the option"
        )
    with blame:
        _check_token_ids(environment.stop_token_ids, sampling.vocab_size)
    while len(token_ids) < most:
        request = SampleRequest(trajectory_id, token_ids, most - len(token_ids), environment.stop_token_ids, routed)
        segment = await sampling.engine.generate(request)
        if segment.token_ids:
            segments.append(segment)
        token_ids += segment.token_ids
        unobserved += segment.token_ids
        routed += 0 if segment.routed_experts is None else len(segment.routed_experts)
        if segment.finish_reason == "abort":
            continue  # interrupted, perhaps by new weights: it goes on from here
        if segment.finish_reason == "length":
            break
        with blame:
            observation = await environment.step(unobserved)
            _check_token_ids(observation.token_ids, sampling.vocab_size)
        unobserved = ()
        if len(token_ids) + len(observation.token_ids) > most:
            break  # nothing could be sampled after it: it is left out whole, rather than cut
        if observation.token_ids:
            segments.append(Segment.observation(observation.token_ids, segment.weight_version))
            token_ids += observation.token_ids
        if observation.done:
            return segments, "stop"
    return segments, "length"


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
