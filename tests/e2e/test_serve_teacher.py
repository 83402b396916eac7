"""Ranks of a teacher service end together, however one of them ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from small_run import Mopd, assert_nothing_left, processes_of


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_ends_all(rank: int, mopd: Mopd, tmp_path: Path) -> None:
    options = ["service.num_processes=2", "service.megatron.pipeline_model_parallel_size=2"]
    process = mopd.start("serve-teacher", f"run.folder={tmp_path}", "teachers.backend=megatron", *options)
    assert process.stdout is not None
    assert any(line.startswith("teacher service at ") for line in process.stdout)
    environments = {pid: Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in processes_of(tmp_path)}
    (dies,) = (pid for pid, environment in environments.items() if f"RANK={rank}".encode() in environment)
    os.kill(dies, signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL, out + err
    assert f"rank {rank} was ended by SIGKILL" in err
    assert_nothing_left(tmp_path)
