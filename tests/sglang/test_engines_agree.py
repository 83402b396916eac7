"""Law 3: a checkpoint against itself, across SGLang and Megatron, in float32: no log-prob of a token differs by 1e-4.

200 trajectories of one server, sampled and prefilled; Megatron in a process of its own. Token ids below 245 are read as
UTF-8: prompts and observations of many scripts end in the middle of a character, and sampled bytes make no text at all.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from running import Server
from tiny import VOCAB_SIZE

from megatron_mopd.batch import Batch
from megatron_mopd.config import Config
from megatron_mopd.yaml_tree import overlay
from tools.check_mismatch import PAIRS, Case, Measurement, config_of, measure, random_cases

pytestmark = pytest.mark.sglang

ROOT = Path(__file__).parents[2]
BOUND = 1e-4
TEXT = "Ω naïve café — 漢字と仮名 한국어 ไทย עברית العربية हिन्दी 🙂👩‍🔬 \U00020000 ∑√∞".encode()
NUM_TRAJECTORIES, TURN_TOKENS = 200, 24


def cases() -> list[Case]:
    """Those of the tool, and 40 of text: every prompt a piece of it, cut anywhere."""
    text = [Case(tuple(TEXT[i % 40 : i % 40 + 12 + i]), (8, 4), tuple(TEXT[2 * i : 2 * i + 3])) for i in range(40)]
    return random_cases(NUM_TRAJECTORIES - len(text), VOCAB_SIZE, TURN_TOKENS) + text


@pytest.fixture(scope="module")
def config(student: Server, tmp_path_factory: pytest.TempPathFactory) -> Config:
    config = config_of(student.checkpoint, tmp_path_factory.mktemp("mismatch") / "run", TURN_TOKENS)
    return Config.model_validate(overlay(config.model_dump(), {"sglang": {"student": {"urls": [student.url]}}}))


@pytest.fixture(scope="module")
def measured(config: Config) -> Measurement:
    return measure(config, cases())


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_no_engine_differs_from_another(first: str, second: str, measured: Measurement) -> None:
    (comparison,) = (c for c in measured.comparisons if (c.first, c.second) == (first, second))
    assert comparison.max < BOUND
    assert 0.0 <= comparison.kl < BOUND**2
    assert comparison.mean.count == sum(q.count for q in comparison.quarters)
    assert comparison.mean.count >= measured.batch.loss_mask.sum()


def test_the_trajectories_hold_what_is_easily_got_wrong(measured: Measurement) -> None:
    batch = measured.batch
    assert len(batch) == NUM_TRAJECTORIES
    sampled = batch.loss_tokens
    assert (sampled == 0).sum() >= 5
    assert (sampled == 1).sum() >= 5
    last = batch.token_ids == VOCAB_SIZE - 1
    assert (last & ~batch.loss_mask).any(), "read as an input"
    assert (last & batch.loss_mask).any(), "sampled"
    assert bytes(measured.batch.token_ids[batch.offsets[-2] :][:12].tolist()) in TEXT


def test_every_route_was_recorded_and_is_the_learners(measured: Measurement) -> None:
    """Two turns each: the routes of the first one count too (verl #5344)."""
    assert measured.batch.routed_experts is not None
    assert measured.route_agreement is not None
    recorded = (measured.batch.routed_experts >= 0).all((1, 2))
    covered = sum(covered_positions(measured.batch, row) for row in range(len(measured.batch)))
    assert recorded.sum() == covered
    assert measured.route_agreement.count == 4 * covered
    assert measured.route_agreement.value > 0.999


def covered_positions(batch: Batch, row: int) -> int:
    """All inputs up to the one that gave the last sampled token."""
    sampled = np.flatnonzero(batch.loss_mask[batch.offsets[row] : batch.offsets[row + 1]])
    return int(sampled[-1]) if len(sampled) else 0


def tool(checkpoint: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/check_mismatch.py", str(checkpoint), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_the_tool_measures_a_learner_of_another_layout(student: Server) -> None:
    layout = ["launch.num_processes=2", "megatron.tensor_model_parallel_size=2"]
    result = tool(student.checkpoint, "--url", student.url, "--trajectories", "20", "--json", *layout)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["trajectories"] == 20
    assert [(c["first"], c["second"]) for c in report["comparisons"]] == list(PAIRS)
    assert all(c["max"] < BOUND for c in report["comparisons"])


def test_the_tool_says_what_is_wrong_with_a_url(student: Server) -> None:
    result = tool(student.checkpoint, "--url", "http://127.0.0.1:9", "--trajectories", "2", "sglang.start_timeout_s=1")
    assert result.returncode == 2, result.stderr
    assert "http://127.0.0.1:9" in result.stderr.strip().splitlines()[-1]
