"""Laws of `mopd gateway`: what a client may say of its session, and what is kept of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from megatron_mopd.config import Config, Prompts, Rollout, Run, Student
from megatron_mopd.rollout.chat_request import Refused
from megatron_mopd.serve_student import keep, read_prompt
from megatron_mopd.trajectory_file import read_trajectories
from megatron_mopd.types import Prompt, RenderedPrompt, Segment, Trajectory


def config(folder: Path) -> Config:
    return Config(
        run=Run(folder=folder, num_steps=1),
        student=Student(checkpoint=folder),
        prompts=Prompts(batch_size=1, mixture={"law": 1.0}),
        rollout=Rollout(max_response_tokens=1),
    )


def test_a_session_has_a_domain_and_perhaps_an_effort_and_a_name(tmp_path: Path) -> None:
    assert read_prompt({"domain": "law", "effort": "low", "id": "t-1"}, config(tmp_path)).id == "t-1"
    bare = [read_prompt({"domain": "law"}, config(tmp_path)) for _ in range(2)]
    assert bare[0].effort == ""
    assert bare[0].id != bare[1].id


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "domain: it must be one of law"),
        ({"domain": ["law"]}, "domain: it must be one of law"),
        ({"domain": "law", "effort": "huge"}, "effort: it must be one of low, high, max, or left out"),
        ({"domain": "law", "id": "../x"}, "id: it must be of letters"),
        ({"domain": "law", "id": 7}, "id: it must be of letters"),
        ({"domain": "law", "label": 7}, "'label' is not known; a session has domain, effort and id"),
    ],
)
def test_what_is_no_session_is_refused(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(Refused) as caught:
        read_prompt(row, config(tmp_path))
    assert caught.value.status == 400
    assert caught.value.message.startswith(reason)


def test_a_finished_trajectory_is_kept(tmp_path: Path) -> None:
    prompt = RenderedPrompt(Prompt("t", "law", "low", "gateway", ({"role": "user", "content": "x"},)), (1, 2), (2,))
    segments = (Segment((3,), (-0.5,), (True,), 4), Segment.observation((5,), 4), Segment((6,), (-1.0,), (True,), 5))
    trajectory = Trajectory("t@1", prompt, segments, "stop")
    asyncio.run(keep(trajectory, tmp_path))
    (found,) = read_trajectories(tmp_path / "t@1.safetensors")
    assert (found.trajectory, found.weight_version) == (trajectory, 5)
