"""What a scheduler has in flight: prompts with their samples, and how both stand in the token log.

Promise (tests/unit/test_scheduler.py): a pool that was written and read back goes on as it would have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_mopd.errors import UserError
from megatron_mopd.prompts.source import Place
from megatron_mopd.rollout.environments import MakeEnvironment
from megatron_mopd.rollout.sampler import Rollout, environment_of
from megatron_mopd.rollout.token_log import Cut, Frame, TokenLog
from megatron_mopd.trajectory_file import (
    prompt_record,
    read_prompt,
    read_segments,
    segment_columns,
    segment_record,
)
from megatron_mopd.types import Outcome, RenderedPrompt, Trajectory


@dataclass(eq=False)
class Entry:
    """A prompt, and all its samples."""

    place: Place
    prompt: RenderedPrompt
    samples: list[Rollout]
    done: list[int] = field(default_factory=list)
    """Samples that are finished, in that order."""
    num_emitted: int = 0
    """Of `done`: those that are in the batch of the step under way."""
    logged: list[int] = field(default_factory=list)
    """Segments of each sample that are in the token log."""
    first_logged: int | None = None
    """The step whose file has the first of it."""

    @property
    def is_whole(self) -> bool:
        return len(self.done) == len(self.samples)

    @property
    def begun_at(self) -> int | None:
        """The oldest weights that a token of it comes from."""
        return min((s.begun_at for s in self.samples if s.begun_at is not None), default=None)


def new_entry(
    place: Place, prompt: RenderedPrompt, environments: Mapping[str, MakeEnvironment], samples_per_prompt: int
) -> Entry:
    """Its samples are named after their place in all draws, which no interruption changes."""
    make = environment_of(prompt, environments)
    first = place.position * samples_per_prompt
    names = [f"{first + i}/{prompt.prompt.id}@{place.step}" for i in range(samples_per_prompt)]
    return Entry(place, prompt, [Rollout(name, prompt, make) for name in names], logged=[0] * len(names))


async def write_pool(log: TokenLog, step: int, pool: Sequence[Entry], place: Place) -> Cut:
    """What `step` leaves behind. Only what the log does not have yet is written, and all snapshots."""
    frames = []
    for entry in pool:
        if entry.first_logged is None:
            entry.first_logged = step
            names = [sample.id for sample in entry.samples]
            head = {"kind": "prompt", "place": entry.place, "names": names, **prompt_record(entry.prompt)}
            frames.append(Frame(head, {}))
        for i, sample in enumerate(entry.samples):
            new = sample.segments[entry.logged[i] :]
            entry.logged[i] = len(sample.segments)
            frames.append(Frame(await _sample_head(entry, i, sample), segment_columns(new)))
            frames[-1].head["segments"] = [segment_record(s) for s in new]
    prompts = [{"place": e.place, "done": e.done} for e in pool]
    frames.append(Frame({"kind": "pool", "next": place, "prompts": prompts}, {}))
    return log.write(step, min((e.first_logged for e in pool if e.first_logged is not None), default=step), frames)


async def _sample_head(entry: Entry, index: int, sample: Rollout) -> dict[str, Any]:
    finished = sample.trajectory
    return {
        "kind": "sample",
        "place": entry.place,
        "sample": index,
        "observed": sample.observed,
        "state": None if finished else await sample.snapshot(),
        "finish_reason": finished and finished.finish_reason,
        "outcome": finished and finished.outcome and asdict(finished.outcome),
    }


def read_pool(log: TokenLog, cut: Cut, environments: Mapping[str, MakeEnvironment]) -> tuple[list[Entry], Place]:
    """The pool at that cut, and where the sequence of prompts goes on. UserError where the log does not give it."""
    return pool_of(log.read(cut), cut, environments, log.file(cut.step))


def pool_of(
    frames: Sequence[Frame], cut: Cut, environments: Mapping[str, MakeEnvironment], file: Path
) -> tuple[list[Entry], Place]:
    """The same of all frames; `file` is named in errors."""
    try:
        return _pool(frames, cut, environments)
    except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UserError(
            f"{file} and those before it do not hold the trajectories in flight ({reason}); put them back as they "
            "were, or continue from another checkpoint"
        ) from error


def _pool(frames: Sequence[Frame], cut: Cut, environments: Mapping[str, MakeEnvironment]) -> tuple[list[Entry], Place]:
    prompts: dict[Place, Frame] = {}
    samples: dict[tuple[Place, int], list[Frame]] = {}
    first: dict[Place, int] = {}
    step = cut.first
    last: dict[str, Any] | None = None
    for frame in frames:
        head = frame.head
        if head["kind"] == "pool":
            last, step = head, step + 1
            continue
        place = Place(*head["place"])
        if head["kind"] == "prompt":
            prompts[place], first[place] = frame, step
        else:
            samples.setdefault((place, head["sample"]), []).append(frame)
    if last is None or step != cut.step + 1:
        raise ValueError(f"{step - cut.first} of {cut.step + 1 - cut.first} steps")
    pool = []
    for record in last["prompts"]:
        place = Place(*record["place"])
        head = prompts[place].head
        prompt = read_prompt(head)
        make = environment_of(prompt, environments)
        rollouts = [_rollout(name, prompt, make, samples[place, i]) for i, name in enumerate(head["names"])]
        done = [int(i) for i in record["done"]]
        if sorted(done) != [i for i, r in enumerate(rollouts) if r.trajectory is not None]:
            raise ValueError(f"of {prompt.prompt.id} other samples are finished than {done}")
        logged = [len(r.segments) for r in rollouts]
        pool.append(Entry(place, prompt, rollouts, done, logged=logged, first_logged=first[place]))
    return pool, Place(*last["next"])


def _rollout(name: str, prompt: RenderedPrompt, make: MakeEnvironment, frames: Sequence[Frame]) -> Rollout:
    segments = [s for frame in frames for s in read_segments(frame.head["segments"], frame.columns)]
    head = frames[-1].head
    rollout = Rollout(name, prompt, make, segments, head["observed"], head["state"])
    if (reason := head["finish_reason"]) is not None:
        outcome = None if head["outcome"] is None else Outcome(**head["outcome"])
        rollout.trajectory = replace(Trajectory(name, prompt, tuple(segments), reason), outcome=outcome)
    return rollout
