"""Laws of sampling: one append-only token log per trajectory, shared between the engine and an environment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import VOCAB_SIZE, write_checkpoint

from megatron_mopd import config
from megatron_mopd.embedded.engine import EmbeddedEngine
from megatron_mopd.errors import UserError
from megatron_mopd.protocols import Observation, SampleRequest
from megatron_mopd.rollout.environments import MakeEnvironment, SingleTurn, load_environments, load_factory
from megatron_mopd.rollout.sampler import EnvironmentFailed, Sampling, sample
from megatron_mopd.types import Cell, Outcome, Prompt, RenderedPrompt, Segment, Trajectory

CALL, END = 1, 2
MAX_TOKENS = 1000


class Scripted:
    """An engine that says what a script holds for each trajectory, and notes what it was asked for."""

    weight_version = 4

    def __init__(self, scripts: Mapping[str, Sequence[int]]) -> None:
        self.scripts = {name: list(ids) for name, ids in scripts.items()}
        self.asked: list[SampleRequest] = []

    async def generate(self, request: SampleRequest) -> Segment:
        self.asked.append(request)
        script, ids = self.scripts[request.trajectory_id], []
        while len(ids) < request.max_new_tokens:
            ids.append(script.pop(0))
            if ids[-1] in request.stop_token_ids:
                break
        reason = "stop" if ids[-1] in request.stop_token_ids else "length"
        return Segment(tuple(ids), (-0.5,) * len(ids), (True,) * len(ids), self.weight_version, reason)

    async def update_weights(self, folder: Path, weight_version: int) -> None: ...

    async def close(self) -> None: ...


class Interrupted(Scripted):
    """Gives up after every token, and now and then before the first one."""

    async def generate(self, request: SampleRequest) -> Segment:
        if len(self.asked) % 3 == 2:
            self.asked.append(request)
            return Segment((), (), (), self.weight_version, "abort")
        one = await super().generate(replace(request, max_new_tokens=1))
        ended = one.finish_reason == "stop" or request.max_new_tokens == 1
        return one if ended else replace(one, finish_reason="abort")


class Tool:
    """Answers a CALL with `size` tokens, ends at END."""

    stop_token_ids: tuple[int, ...] = (CALL, END)

    def __init__(self, prompt: Prompt, size: int = 2) -> None:
        self.size = size

    async def step(self, token_ids: tuple[int, ...]) -> Observation:
        return Observation((90,) * self.size if token_ids[-1] == CALL else (), done=token_ids[-1] == END)

    async def score(self, trajectory: Trajectory) -> Outcome:
        return Outcome(1.0, int(trajectory.loss_mask.sum()))


def rendered(*ids: str, environment: str = "tool") -> list[RenderedPrompt]:
    return [RenderedPrompt(Prompt(i, "agents", "low", environment, ()), (10, 11), (10, 12)) for i in ids]


def collect(
    engine: Any,
    prompts: Sequence[RenderedPrompt],
    environments: Mapping[str, MakeEnvironment],
    most: int,
    suffix: str = "@7",
    samples_per_prompt: int = 1,
    taus: Mapping[Cell, float] | None = None,
) -> list[Trajectory]:
    sampling = Sampling(engine, environments, most, VOCAB_SIZE, MAX_TOKENS, taus or {})

    async def body() -> list[Trajectory]:
        try:
            return [t async for t in sample(prompts, sampling, suffix, samples_per_prompt)]
        finally:
            await engine.close()

    return asyncio.run(body())


def test_observations_are_masked_and_lengths_agree() -> None:
    engine = Scripted({"0/p@7": [5, CALL, 6, 7, CALL, 8, END]})
    (t,) = collect(engine, rendered("p"), {"tool": Tool}, 50)
    assert t.id == "0/p@7"
    assert t.response_ids.tolist() == [5, CALL, 90, 90, 6, 7, CALL, 90, 90, 8, END]
    assert t.loss_mask.tolist() == [True] * 2 + [False] * 2 + [True] * 3 + [False] * 2 + [True] * 2
    assert t.rollout_logprobs.tolist() == [-0.5 * m for m in t.loss_mask]
    assert t.weight_versions.tolist() == [4] * 11
    assert [s.finish_reason for s in t.segments] == ["stop", "observation", "stop", "observation", "stop"]
    assert t.finish_reason == "stop"
    assert t.outcome == Outcome(1.0, 7)


@pytest.mark.parametrize("most", [50, 9, 3])
def test_an_interrupted_trajectory_has_the_token_log_of_one_that_was_not(most: int) -> None:
    """The environment, too, is asked about whole stretches."""
    seen: list[tuple[int, ...]] = []

    class Watching(Tool):
        async def step(self, token_ids: tuple[int, ...]) -> Observation:
            seen.append(token_ids)
            return await super().step(token_ids)

    script = {"0/p@7": [5, CALL, 6, 7, CALL, 8, END]}
    (whole,) = collect(Scripted(script), rendered("p"), {"tool": Watching}, most)
    steps, seen[:] = list(seen), []
    (pieces,) = collect(Interrupted(script), rendered("p"), {"tool": Watching}, most)
    assert pieces.response_ids.tolist() == whole.response_ids.tolist()
    assert pieces.loss_mask.tolist() == whole.loss_mask.tolist()
    assert (pieces.finish_reason, pieces.outcome) == (whole.finish_reason, whole.outcome)
    assert seen == steps
    assert len(pieces.segments) > len(whole.segments)


def test_each_request_continues_the_whole_log_and_asks_for_what_is_left() -> None:
    engine = Scripted({"0/p@7": [5, CALL, 6, 7, CALL, 8, END]})
    collect(engine, rendered("p"), {"tool": Tool}, 12)
    assert [(len(r.token_ids) - 2, r.max_new_tokens) for r in engine.asked] == [(0, 12), (4, 8), (9, 3)]
    assert engine.asked[1].token_ids == (10, 11, 5, CALL, 90, 90)


@pytest.mark.parametrize(
    ("most", "response", "reason"),
    [
        (3, [5, CALL], "length"),  # the observation would not fit: left out whole
        (4, [5, CALL, 90, 90], "length"),  # it fits, and nothing else does
        (5, [5, CALL, 90, 90, 6], "length"),
        (11, [5, CALL, 90, 90, 6, 7, CALL, 90, 90, 8, END], "stop"),  # the last token ends it in time
    ],
)
def test_sampled_and_observed_tokens_share_one_budget(most: int, response: list[int], reason: str) -> None:
    (t,) = collect(Scripted({"0/p@7": [5, CALL, 6, 7, CALL, 8, END]}), rendered("p"), {"tool": Tool}, most)
    assert (t.response_ids.tolist(), t.finish_reason) == (response, reason)


def test_a_prompt_that_is_drawn_twice_makes_two_trajectories() -> None:
    engine = Scripted({"0/p@7": [5, 6, END], "1/p@7": [END]})
    got = collect(engine, rendered("p", "p"), {"tool": Tool}, 9)
    assert {t.id: t.response_ids.tolist() for t in got} == {"0/p@7": [5, 6, END], "1/p@7": [END]}


@pytest.mark.parametrize("error", [KeyError("table"), SystemExit(3)])
def test_an_environment_that_fails_is_named_with_its_trajectory(error: BaseException) -> None:
    class Broken(Tool):
        async def step(self, token_ids: tuple[int, ...]) -> Observation:
            raise error

    engine = Scripted({"0/p@7": [CALL]})
    reason = f"{type(error).__name__}: {error}"
    with pytest.raises(EnvironmentFailed, match=f"environment 'tool' of trajectory 0/p@7 failed: {reason}"):
        collect(engine, rendered("p"), {"tool": Broken}, 9)


@pytest.mark.parametrize(
    ("observed", "reason"),
    [
        ((VOCAB_SIZE,), f"{VOCAB_SIZE} is not a token id of the student, whose vocabulary has {VOCAB_SIZE}"),
        ((-1,), "-1 is not a token id"),
        ((1.5,), "1.5 is not a token id"),
        (("a",), "'a' is not a token id"),
    ],
)
def test_an_observation_outside_the_vocabulary_is_refused(observed: tuple[Any, ...], reason: str) -> None:
    class Babbler(Tool):
        async def step(self, token_ids: tuple[int, ...]) -> Observation:
            return Observation(observed, done=True)

    with pytest.raises(EnvironmentFailed, match=f"environment 'tool' of trajectory 0/p@7 failed: ValueError: {reason}"):
        collect(Scripted({"0/p@7": [CALL]}), rendered("p"), {"tool": Babbler}, 9)


@pytest.mark.parametrize("outcome", [None, 1.0, Outcome(float("nan"), 1)])
def test_a_score_that_is_no_outcome_is_refused(outcome: Any) -> None:
    class Judge(Tool):
        async def score(self, trajectory: Trajectory) -> Outcome:
            return outcome

    with pytest.raises(EnvironmentFailed, match="score must return an Outcome with a finite reward, not"):
        collect(Scripted({"0/p@7": [END]}), rendered("p"), {"tool": Judge}, 9)


@pytest.mark.parametrize("spent", [None, -1, 1.5, "3"])
def test_spent_tokens_are_a_count(spent: Any) -> None:
    class Judge(Tool):
        async def score(self, trajectory: Trajectory) -> Outcome:
            return Outcome(1.0, spent)

    with pytest.raises(EnvironmentFailed, match="score must return an Outcome with a count of spent tokens, not"):
        collect(Scripted({"0/p@7": [END]}), rendered("p"), {"tool": Judge}, 9)


def test_numbers_of_numpy_s_kinds_become_python_s_own() -> None:
    """They are written as JSON, which knows no others."""

    class Judge(Tool):
        async def score(self, trajectory: Trajectory) -> Outcome:
            return Outcome(np.float32(0.5), trajectory.loss_mask.sum())  # pyright: ignore[reportArgumentType]

    (t,) = collect(Scripted({"0/p@7": [5, END]}), rendered("p"), {"tool": Judge}, 9)
    assert t.outcome is not None
    assert json.loads(json.dumps(asdict(t.outcome))) == {"reward": 0.5, "spent_tokens": 2, "budget_tokens": None}


def test_a_budget_of_the_environment_s_own_is_refused() -> None:
    class Generous(Tool):
        async def score(self, trajectory: Trajectory) -> Outcome:
            return Outcome(1.0, 1, budget_tokens=100)

    with pytest.raises(EnvironmentFailed, match=r"it is the prompt's budget_tokens times budgets\.tau"):
        collect(Scripted({"0/p@7": [END]}), rendered("p"), {"tool": Generous}, 9)


def test_each_prompt_is_sampled_so_many_times_as_one_group() -> None:
    scripts = {"0/p@7": [END], "1/p@7": [5, END], "2/q@7": [6, END], "3/q@7": [END]}
    got = collect(Scripted(scripts), rendered("p", "q"), {"tool": Tool}, 9, samples_per_prompt=2)
    assert {t.id: (t.group, len(t.response_ids)) for t in got} == {
        "0/p@7": (0, 1),
        "1/p@7": (0, 2),
        "2/q@7": (1, 2),
        "3/q@7": (1, 1),
    }


def test_a_stop_token_outside_the_vocabulary_is_refused() -> None:
    class Endless(Tool):
        stop_token_ids: Any = (None,)

    with pytest.raises(EnvironmentFailed, match="None is not a token id"):
        collect(Scripted({}), rendered("p"), {"tool": Endless}, 9)


def test_a_prompt_that_leaves_no_positions_for_the_response_is_refused() -> None:
    with pytest.raises(UserError, match=r"prompt p of 2 tokens and rollout.max_response_tokens=999 exceed .* \(1000\)"):
        collect(Scripted({}), rendered("p"), {"tool": Tool}, 999)


def test_an_unknown_environment_is_refused() -> None:
    with pytest.raises(UserError, match="prompt p wants environment 'sandbox'"):
        collect(Scripted({}), rendered("p", environment="sandbox"), {"tool": Tool}, 9)


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("student")
    write_checkpoint(folder)
    return folder


def test_a_step_is_the_same_to_the_bit_and_in_order(student: Path) -> None:
    """Real engine, tool calls, a batch that does not fit at once: order of finish, tokens, log-probs, masks."""
    prompts = [
        RenderedPrompt(Prompt(f"p{i}", "agents", "low", "tool", ()), tuple(range(10, 11 + i % 6)), (10,))
        for i in range(40)
    ]
    stops = tuple(range(20, 60))

    class Chatty(Tool):
        stop_token_ids: tuple[int, ...] = stops

        async def step(self, token_ids: tuple[int, ...]) -> Observation:
            last = token_ids[-1]
            return Observation((last,) * (last % 12), done=last > 50)

    def run(suffix: str = "@1") -> list[Trajectory]:
        engine = EmbeddedEngine(student, seed=3, max_batch_size=16)
        return collect(engine, prompts, {"tool": Chatty}, 40, suffix)

    first = run()
    assert first == run()
    assert first != run("@2")
    assert [t.id for t in first] != [f"{i}/p{i}@1" for i in range(40)]
    assert {t.finish_reason for t in first} == {"stop", "length"}
    for t in first:
        assert len(t.response_ids) <= 40
        assert (t.response_ids < VOCAB_SIZE).all()


class Words:
    """The part of a tokenizer that SingleTurn uses."""

    eos_token_id = END

    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int]:
        return [int(t) for t in tokens]

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return " ".join(str(i) for i in ids if not (skip_special_tokens and i == END))


@pytest.mark.parametrize(("label", "reward"), [("5 6", 1.0), ("5 6 2", 0.0), ("5", 0.0)])
def test_single_turn_rewards_the_exact_label(label: str, reward: float) -> None:
    prompt = RenderedPrompt(Prompt("p", "general", "low", "qa", (), label=label), (10,), (10,))
    table = config.Environment(factory="megatron_mopd.rollout.environments:SingleTurn")
    (t,) = collect(Scripted({"0/p@7": [5, 6, END]}), [prompt], load_environments({"qa": table}, Words()), 9)
    assert t.outcome == Outcome(reward, 3)


@pytest.mark.parametrize(("b0", "budget", "within"), [(2.0, 3.0, True), (1.9, 2.85, False), (None, None, True)])
def test_the_sampler_adds_the_budget_of_prompt_and_cell(b0: float | None, budget: float | None, within: bool) -> None:
    prompt = replace(Prompt("p", "agents", "low", "tool", ()), budget_tokens=b0)
    (t,) = collect(
        Scripted({"0/p@7": [5, 6, END]}),
        [RenderedPrompt(prompt, (10,), (10,))],
        {"tool": Tool},
        9,
        taus={Cell("agents", "low"): 1.5, Cell("agents", "max"): 9.0},
    )
    assert t.outcome is not None
    assert t.outcome.budget_tokens == (None if budget is None else pytest.approx(budget))
    assert t.outcome.is_within_budget == within
    assert t.outcome.reward_within_budget == float(within)


def test_single_turn_stops_where_it_is_told() -> None:
    prompt = Prompt("p", "general", "low", "qa", ())
    assert SingleTurn(prompt, Words()).stop_token_ids == (END,)
    assert SingleTurn(prompt, Words(), stop_tokens=["7", "8"]).stop_token_ids == (7, 8)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nonsense", r"environments\.qa\.factory='nonsense' must have the form package\.module:Class"),
        ("no.such:Thing", r"environments\.qa\.factory='no\.such:Thing' cannot be imported"),
        ("megatron_mopd.errors:Thing", "module megatron_mopd.errors has no Thing"),
        ("megatron_mopd.rollout.environments:__name__", "__name__ is not callable"),
    ],
)
def test_a_factory_that_cannot_be_had_is_refused_by_its_key(path: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_factory("qa", path)
