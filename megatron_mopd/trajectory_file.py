"""Whole trajectories on disk, segments and all, so that what has been sampled outlives the process that sampled it.

A safetensors file: tokens of all segments of all trajectories in columns, everything else as JSON in its metadata.
Promises (tests/unit/test_trajectory_file.py): reading gives what was written, to the bit; a file that was cut, or is
another's, is a UserError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from megatron_mopd.errors import UserError
from megatron_mopd.hf_folder import let_others_read
from megatron_mopd.types import Outcome, Prompt, RenderedPrompt, Segment, Trajectory


@dataclass(frozen=True)
class Sampled:
    """A finished trajectory on its way to its scores. `weight_version` is that of the step that sampled it."""

    trajectory: Trajectory
    weight_version: int
    teacher_logprobs: np.ndarray | None = None
    """[R] float32 once its teacher has scored it."""
    teacher_hidden: np.ndarray | None = None
    """[R, D] with them, if the objective needs them; see scores.py."""


def write_trajectories(file: Path, sampled: Sequence[Sampled]) -> None:
    segments = [segment for s in sampled for segment in s.trajectory.segments]
    scores = [s.teacher_logprobs for s in sampled if s.teacher_logprobs is not None]
    hidden = [s.teacher_hidden.reshape(-1) for s in sampled if s.teacher_hidden is not None]
    columns = {
        **segment_columns(segments),
        "teacher_logprobs": _joined(scores, np.float32),
        "teacher_hidden": np.concatenate(hidden) if hidden else np.zeros(0, np.float32),
    }
    save_file(columns, file, metadata={"trajectories": json.dumps([_record(s) for s in sampled])})
    let_others_read(file)


def read_trajectories(file: Path) -> list[Sampled]:
    try:
        with safe_open(file, framework="numpy") as opened:
            records = json.loads(opened.metadata()["trajectories"])
            columns = {name: _Column(opened.get_tensor(name)) for name in opened.keys()}  # noqa: SIM118 (no container)
        return [_sampled(record, columns) for record in records]
    except (SafetensorError, OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{file} does not hold trajectories of this project: {' '.join(str(error).split())}; put the file back as "
            "it was, or remove it, which loses them"
        ) from error


def _record(sampled: Sampled) -> dict[str, Any]:
    t = sampled.trajectory
    return {
        "id": t.id,
        **prompt_record(t.prompt),
        "finish_reason": t.finish_reason,
        "outcome": t.outcome and asdict(t.outcome),
        "group": t.group,
        "weight_version": sampled.weight_version,
        "scored": sampled.teacher_logprobs is not None,
        "hidden_width": None if sampled.teacher_hidden is None else sampled.teacher_hidden.shape[1],
        "segments": [segment_record(s) for s in t.segments],
    }


def prompt_record(rendered: RenderedPrompt) -> dict[str, Any]:
    prompt = rendered.prompt
    return {
        "prompt": {**asdict(prompt), "messages": [dict(m) for m in prompt.messages]},
        "student_ids": rendered.student_ids,
        "teacher_ids": rendered.teacher_ids,
    }


def segment_record(segment: Segment) -> dict[str, Any]:
    """All but its columns."""
    return {
        "tokens": len(segment.token_ids),
        "weight_version": segment.weight_version,
        "finish_reason": segment.finish_reason,
        "routes": None if segment.routed_experts is None else segment.routed_experts.shape,
        "kv_version": segment.kv_version,
    }


def segment_columns(segments: Sequence[Segment]) -> dict[str, np.ndarray]:
    """The tokens of all of them."""
    routes = [s.routed_experts.reshape(-1) for s in segments if s.routed_experts is not None]
    return {
        "token_ids": _joined([np.asarray(s.token_ids, np.int32) for s in segments], np.int32),
        "logprobs": _joined([np.asarray(s.logprobs, np.float64) for s in segments], np.float64),
        "loss_mask": _joined([np.asarray(s.loss_mask, np.bool_) for s in segments], np.bool_),
        "routed_experts": _joined(routes, np.int16),
    }


def read_prompt(record: dict[str, Any]) -> RenderedPrompt:
    prompt = Prompt(**{**record["prompt"], "messages": tuple(record["prompt"]["messages"])})
    return RenderedPrompt(prompt, tuple(record["student_ids"]), tuple(record["teacher_ids"]))


def read_segments(records: Sequence[dict[str, Any]], columns: Mapping[str, np.ndarray]) -> tuple[Segment, ...]:
    takers = {name: _Column(values) for name, values in columns.items()}
    return tuple(_segment(record, takers) for record in records)


class _Column:
    """A column that is read from its beginning to its end."""

    def __init__(self, values: np.ndarray):
        self._values, self._at = values, 0

    def take(self, count: int) -> np.ndarray:
        self._at += count
        return self._values[self._at - count : self._at]


def _sampled(record: dict[str, Any], columns: dict[str, _Column]) -> Sampled:
    segments = tuple(_segment(s, columns) for s in record["segments"])
    rendered = read_prompt(record)
    outcome = None if record["outcome"] is None else Outcome(**record["outcome"])
    trajectory = Trajectory(record["id"], rendered, segments, record["finish_reason"], outcome, record["group"])
    tokens = sum(len(s.token_ids) for s in segments)
    scores = columns["teacher_logprobs"].take(tokens) if record["scored"] else None
    width, hidden = record["hidden_width"], None
    if width is not None:
        hidden = columns["teacher_hidden"].take(tokens * width).reshape(tokens, width)
    return Sampled(trajectory, record["weight_version"], scores, hidden)


def _segment(record: dict[str, Any], columns: dict[str, _Column]) -> Segment:
    n, shape = record["tokens"], record["routes"]
    return Segment(
        token_ids=tuple(columns["token_ids"].take(n).tolist()),
        logprobs=tuple(columns["logprobs"].take(n).tolist()),
        loss_mask=tuple(columns["loss_mask"].take(n).tolist()),
        weight_version=record["weight_version"],
        finish_reason=record["finish_reason"],
        routed_experts=None if shape is None else columns["routed_experts"].take(int(np.prod(shape))).reshape(shape),
        kv_version=record.get("kv_version"),  # files of before it was recorded have none
    )


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts])
