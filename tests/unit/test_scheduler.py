"""Partial rollouts: what a step trains on, in which order, how old, and what a process leaves to the next."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_engine import OneTurn, ToyEngine, render

from megatron_mopd.config import Partial, Prompts
from megatron_mopd.errors import UserError
from megatron_mopd.prompts.source import Place, PromptSource
from megatron_mopd.protocols import Observation
from megatron_mopd.rollout.sampler import EnvironmentFailed, Sampling, sample
from megatron_mopd.rollout.scheduler import Scheduler
from megatron_mopd.rollout.token_log import Cut, TokenLog
from megatron_mopd.types import Prompt, Trajectory

BATCH = 8
SYNCHRONOUS = Partial()
HALF_MORE = Partial(oversampling=1.5, max_staleness=2)


def length_of(trajectory_id: str) -> int:
    """From 1 to 60, most of them short."""
    u = zlib.crc32(trajectory_id.encode()) / 2**32
    return 1 + int(59 * u**3)


def source() -> PromptSource[Prompt]:
    prompts = [Prompt(f"{d}{i}", d, "", "toy", ()) for d in ("law", "tax") for i in range(50)]
    table = Prompts.model_validate({"batch_size": BATCH, "mixture": {"law": 1, "tax": 3}, "efforts": {"low": 1}})
    return PromptSource(prompts, table, seed=3)


@dataclass
class Loop:
    """The driver's loop on a toy engine."""

    partial: Partial = SYNCHRONOUS
    samples_per_prompt: int = 1
    folder: Path | None = None
    make: Callable[[Prompt], Any] = OneTurn
    lengths: Callable[[str], int] = length_of
    most: int = 70
    cuts: dict[int, Cut | None] = field(default_factory=dict)
    reports: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine = ToyEngine(self.lengths)
        self.sampling = Sampling(self.engine, {"toy": self.make}, self.most, 100, 1000)
        self.source = source()
        self.scheduler = Scheduler(
            self.source, render, self.sampling, BATCH, self.samples_per_prompt, self.partial
        )  # fmt: skip

    def steps(self, first: int, end: int) -> list[list[Trajectory]]:
        return asyncio.run(self._steps(first, end))

    async def _steps(self, first: int, end: int) -> list[list[Trajectory]]:
        batches = []
        log = TokenLog(self.folder) if self.folder else None
        for step in range(first, end):
            await self.engine.update_weights(None, step)
            self.scheduler.begin(step)
            batches.append([t async for t in self.scheduler.run({})])
            self.reports.append(self.scheduler.report)
            if log is not None:
                self.cuts[step] = await self.scheduler.write(log, step)
        return batches


def content(batches: list[list[Trajectory]]) -> list[list[tuple]]:
    return [
        [(t.id, t.group, t.finish_reason, t.outcome, tuple(map(repr, t.segments))) for t in batch] for batch in batches
    ]


@pytest.mark.parametrize("samples", [1, 3])
def test_without_oversampling_a_step_is_what_sample_yields(samples: int) -> None:
    loop = Loop(samples_per_prompt=samples)

    async def plain() -> list[list[Trajectory]]:
        batches, engine = [], ToyEngine(length_of)
        for step in range(4):
            await engine.update_weights(None, step)
            prompts = render(source().draw(step))
            batches.append(
                [t async for t in sample(prompts, replace(loop.sampling, engine=engine), f"@{step}", samples)]
            )
        return batches

    assert content(loop.steps(0, 4)) == content(asyncio.run(plain()))
    assert loop.reports[-1]["interrupted"] == {}
    assert loop.scheduler.pool == []


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("oversampling", [1.0, 1.2, 1.5, 2.0, 3.0])
def test_every_step_has_whole_prompts_none_too_old_none_lost(oversampling: float, samples: int) -> None:
    partial = Partial(oversampling=oversampling, max_staleness=2)
    loop = Loop(partial, samples)
    batches = loop.steps(0, 30)
    for step, batch in enumerate(batches):
        assert sorted(Counter(t.group for t in batch).values()) == [samples] * BATCH
        for t in batch:
            assert step - t.weight_versions.min() <= partial.max_staleness
            assert (np.diff(t.weight_versions) >= 0).all()
            assert len(t.response_ids) == length_of(t.id)
            assert t.loss_mask.all()
    ids = [t.id for batch in batches for t in batch] + [s.id for e in loop.scheduler.pool for s in e.samples]
    assert len(set(ids)) == len(ids)
    drawn = [p.id for step in range(33) for p in source().draw(step)]
    seen = Counter(i.partition("/")[2].partition("@")[0] for i in ids)
    assert all(seen[p] <= samples * count for p, count in Counter(drawn).items())
    assert any(len(t.segments) > 1 for batch in batches for t in batch) == (oversampling > 1)


def test_interruptions_change_no_token() -> None:
    """Names, and so the noise, are those of a run without; so are the tokens then."""
    whole = {t.id: t.response_ids.tolist() for batch in Loop().steps(0, 12) for t in batch}
    pieces = {t.id: t for batch in Loop(HALF_MORE).steps(0, 10) for t in batch}
    assert {i: t.response_ids.tolist() for i, t in pieces.items()} == {i: whole[i] for i in pieces}
    assert max(len(t.segments) for t in pieces.values()) > 2


def test_the_lengths_that_are_trained_on_are_those_that_are_sampled() -> None:
    """But for the first steps: nothing is dropped for being long."""
    lengths = [[length_of(t.id) for t in batch] for batch in Loop(HALF_MORE).steps(0, 120)]
    drawn = [length_of(f"{i}/{p.id}@{step}") for step in range(120) for i, p in enumerate(source().draw(step))]
    assert np.mean(lengths[0]) < 0.8 * np.mean(drawn)
    late = [n for batch in lengths[10:] for n in batch]
    assert np.mean(late) == pytest.approx(np.mean(drawn), rel=0.05)
    np.testing.assert_allclose(np.quantile(late, [0.25, 0.5, 0.9]), np.quantile(drawn, [0.25, 0.5, 0.9]), atol=2.5)


def test_a_step_takes_fewer_columns_than_its_longest_trajectory() -> None:
    synchronous, partial = Loop(), Loop(HALF_MORE)
    synchronous.steps(0, 30)
    partial.steps(0, 30)
    assert partial.engine.columns < 0.7 * synchronous.engine.columns


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("killed_after", [0, 3, 7])
def test_a_pool_that_was_written_goes_on_as_it_would_have(tmp_path: Path, killed_after: int, samples: int) -> None:
    """Fault 7."""
    undisturbed = Loop(HALF_MORE, samples, tmp_path / "a").steps(0, 12)
    first = Loop(HALF_MORE, samples, tmp_path / "b")
    first.steps(0, killed_after + 3)  # two steps whose batches were lost with it
    cut = first.cuts[killed_after]
    assert cut is not None
    second = Loop(HALF_MORE, samples, tmp_path / "b")
    second.scheduler.restore(TokenLog(tmp_path / "b"), cut)
    assert content(second.steps(killed_after + 1, 12)) == content(undisturbed[killed_after + 1 :])
    assert any(e.environment is not None for entry in second.scheduler.pool for e in entry.samples)


def test_an_environment_that_was_begun_is_restored(tmp_path: Path) -> None:
    first = Loop(HALF_MORE, folder=tmp_path)
    first.steps(0, 2)
    made: list[OneTurn] = []

    class Noted(OneTurn):
        def __init__(self, prompt: Prompt) -> None:
            super().__init__(prompt)
            made.append(self)

    second = Loop(HALF_MORE, folder=tmp_path, make=Noted)
    cut = first.cuts[1]
    assert cut is not None
    second.scheduler.restore(TokenLog(tmp_path), cut)
    waiting = sum(s.trajectory is None for e in second.scheduler.pool for s in e.samples)
    second.steps(2, 3)
    assert [e.restored for e in made[:waiting]] == [{"seen": 1}] * waiting
    assert {e.restored is None for e in made[waiting:]} == {True}


def test_a_draw_taken_in_parts_is_taken_once_and_in_no_cell_s_favour() -> None:
    place, taken = Place(0, 0), []
    for count in (3, 1, 9, 8, 0, 11):
        some, place = source().take(place, count)
        taken += some
    assert place == Place(4, 0)
    assert sorted(p for p, _ in taken) == [Place(s, i) for s in range(4) for i in range(BATCH)]
    assert all(prompt == source().draw(p.step)[p.position] for p, prompt in taken)
    assert {prompt.domain for _, prompt in taken[:3]} == {"law", "tax"} or taken[0][1].domain == "tax"
    whole, after = source().take(Place(2, 0), BATCH)
    assert [prompt for _, prompt in whole] == source().draw(2)
    assert after == Place(3, 0)


def test_what_is_left_of_a_budget_is_asked_for(tmp_path: Path) -> None:
    """Fault 35: with everything generated nothing is."""
    loop = Loop(HALF_MORE, most=24, lengths=lambda i: 1000 if i.startswith("0/") else 1 + length_of(i) % 5)
    batches = loop.steps(0, 6)
    longest = [t for batch in batches for t in batch if t.id.startswith("0/")]
    assert longest
    assert {(len(t.response_ids), t.finish_reason) for t in longest} == {(24, "length")}
    assert any(len(t.segments) > 1 for t in longest)
    for request in loop.engine.asked:
        assert len(request.token_ids) - 2 + request.max_new_tokens == 24


def test_a_turn_that_takes_time_is_waited_for_and_its_trajectory_goes_on_later() -> None:
    class Slow(OneTurn):
        def __init__(self, prompt: Prompt) -> None:
            super().__init__(prompt)
            self.turns_left = length_of(prompt.id) // 4

        async def step(self, token_ids: tuple[int, ...]) -> Observation:
            await asyncio.sleep(0.001)
            self.turns_left -= 1
            return Observation((5, 6), done=self.turns_left < 0)

    loop = Loop(HALF_MORE, make=Slow, lengths=lambda i: 3)  # and then it stops at every token
    batches = loop.steps(0, 4)
    assert all(len(batch) == BATCH for batch in batches)
    assert sum(r["interrupted"].get("turn", 0) + r["interrupted"].get("pause", 0) for r in loop.reports) > 0


def test_an_environment_that_cannot_be_left_is_refused(tmp_path: Path) -> None:
    class Plain:
        stop_token_ids = (0,)

        def __init__(self, prompt: Prompt) -> None: ...

        async def step(self, token_ids: tuple[int, ...]) -> Observation:
            return Observation((), done=True)

        async def score(self, trajectory: Trajectory) -> Any:
            return await OneTurn.score(OneTurn(trajectory.prompt.prompt), trajectory)

    assert len(Loop(SYNCHRONOUS, make=Plain, folder=tmp_path).steps(0, 2)) == 2
    with pytest.raises(EnvironmentFailed, match="it has no snapshot and restore"):
        Loop(HALF_MORE, make=Plain, folder=tmp_path).steps(0, 2)


@pytest.mark.parametrize("state", [[1], {"a": (1,)}, {"a": object()}, None])
def test_a_snapshot_is_what_json_can_hold(tmp_path: Path, state: Any) -> None:
    class Odd(OneTurn):
        async def snapshot(self) -> Any:
            return state

    with pytest.raises(EnvironmentFailed, match=r"environment 'toy' of trajectory .* failed"):
        Loop(HALF_MORE, make=Odd, folder=tmp_path).steps(0, 2)


def test_one_failure_ends_the_step_with_its_name() -> None:
    class Broken(OneTurn):
        async def score(self, trajectory: Trajectory) -> Any:
            raise KeyError(trajectory.id)

    with pytest.raises(EnvironmentFailed, match="KeyError"):
        Loop(HALF_MORE, make=Broken).steps(0, 1)


def test_an_aborted_sample_drops_nothing_of_its_group() -> None:
    """Fault 27: somebody aborts requests while the step goes on."""

    class Rude(ToyEngine):
        async def generate(self, request):  # type: ignore[no-untyped-def]
            segment = await super().generate(replace(request, max_new_tokens=min(3, request.max_new_tokens)))
            cut = segment.finish_reason == "length" and len(segment.token_ids) < request.max_new_tokens
            return replace(segment, finish_reason="abort") if cut else segment

    loop = Loop(HALF_MORE, samples_per_prompt=3)
    rude = Loop(HALF_MORE, samples_per_prompt=3)
    rude.sampling = replace(rude.sampling, engine=Rude(length_of))
    rude.engine = rude.sampling.engine  # pyright: ignore[reportAttributeAccessIssue]
    rude.scheduler = Scheduler(rude.source, render, rude.sampling, BATCH, 3, HALF_MORE)
    want, got = loop.steps(0, 6), rude.steps(0, 6)
    assert [[len(batch), len({t.group for t in batch})] for batch in got] == [[3 * BATCH, BATCH]] * 6
    assert sum(r["interrupted"].get("engine", 0) for r in rude.reports) > 0
    tokens = {t.id: t.response_ids.tolist() for batch in want for t in batch}
    for t in (t for batch in got for t in batch):
        assert t.response_ids.tolist() == tokens.get(t.id, t.response_ids.tolist())


def test_a_log_that_lacks_a_file_is_one_line(tmp_path: Path) -> None:
    first = Loop(HALF_MORE, folder=tmp_path)
    first.steps(0, 5)
    cut = first.cuts[4]
    assert cut is not None
    assert cut.first < 4
    TokenLog(tmp_path).file(cut.first).unlink()
    with pytest.raises(UserError, match=r"in_flight_0000000\d.log: No such file"):
        Loop(HALF_MORE).scheduler.restore(TokenLog(tmp_path), cut)
