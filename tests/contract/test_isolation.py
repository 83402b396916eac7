"""Law 11: teachers and student never touch each other's weights, even where both come from the same folder."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from megatron_mopd.embedded.engine import EmbeddedEngine
from megatron_mopd.embedded.scorer import EmbeddedScorer
from megatron_mopd.protocols import ScoreRequest

ROOT = Path(__file__).parents[2]
REQUESTS = [ScoreRequest(f"t{i}", (1, 2, 3), tuple(range(4, 10 + i))) for i in range(8)]


def digest(model: PreTrainedModel) -> str:
    total = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        total.update(name.encode() + tensor.numpy().tobytes())
    return total.hexdigest()


def folder_digest(folder: Path) -> str:
    return hashlib.sha256(b"".join(f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file())).hexdigest()


def test_scoring_changes_no_weight_of_student_or_teacher(student: Path) -> None:
    async def body() -> None:
        engine, scorer = EmbeddedEngine(student, seed=0), EmbeddedScorer({"t": student})
        teacher = scorer._models["t"]
        before = digest(engine._model), digest(teacher), folder_digest(student)
        await scorer.score("t", REQUESTS)
        assert (digest(engine._model), digest(teacher), folder_digest(student)) == before
        ours = {tensor.data_ptr() for tensor in engine._model.state_dict().values()}
        assert ours.isdisjoint(tensor.data_ptr() for tensor in teacher.state_dict().values())
        assert all(parameter.grad is None for parameter in (*engine._model.parameters(), *teacher.parameters()))
        await engine.close()
        await scorer.close()

    asyncio.run(body())


def test_a_teacher_scores_the_same_bits_after_the_student_has_moved(student: Path, update: Path) -> None:
    async def body() -> None:
        engine, scorer = EmbeddedEngine(student, seed=0), EmbeddedScorer({"t": student})
        first = await scorer.score("t", REQUESTS)
        await engine.update_weights(update, weight_version=1)
        for a, b in zip(first, await scorer.score("t", REQUESTS), strict=True):
            np.testing.assert_array_equal(a, b)
        await engine.close()
        await scorer.close()

    asyncio.run(body())


def test_the_trainer_holds_no_teacher() -> None:
    """What can load a teacher is not even imported where the learner lives."""
    code = (
        "import sys, megatron_mopd.train, megatron_mopd.mcore.learner\n"
        "print([m for m in sys.modules if m.startswith(('megatron_mopd.embedded', 'transformers.models.qwen'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"
