"""The small run once, for all tests that only look at what it left."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_run import Mopd


@pytest.fixture(scope="session")
def undisturbed(mopd: Mopd, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of four steps at TP2 x EP2 without an interruption."""
    run_folder = tmp_path_factory.mktemp("undisturbed") / "run"
    result = mopd("train", f"run.folder={run_folder}")
    assert result.returncode == 0, result.stderr
    return run_folder
