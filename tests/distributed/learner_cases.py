"""What the tests of the learner share: a small batch, a config, and functions for the ranks of a pool to run.

Megatron is imported inside the functions only: its CPU shim must not meet transformers in the test process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tiny import VOCAB_SIZE

from megatron_mopd.batch import Batch
from megatron_mopd.config import Config
from megatron_mopd.step_metrics import StepMetrics
from megatron_mopd.types import Cell

CELLS = (Cell("law", "low"), Cell("law", "high"), Cell("code", "max"))


def config_of(model: Path, megatron: dict[str, Any], **tables: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"folder": "unused", "num_steps": 10},
            "student": {"checkpoint": str(model)},
            "prompts": {"files": ["unused"], "batch_size": 1, "mixture": {"law": 1}},
            "environments": {},
            "rollout": {"max_response_tokens": 8},
            "megatron": {"lr": 1e-3, **megatron},
            **tables,
        }
    )


def batch_of(num_rows: int = 14, seed: int = 0) -> Batch:
    """Rows of 0 to 20 tokens with prompts of 4, some without a response, observations inside, two cells of three."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(6, 21, num_rows)
    lengths[:3] = 4, 2, 0
    total = int(lengths.sum())
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    position = np.arange(total) - np.repeat(offsets[:-1], lengths)
    return Batch(
        offsets=offsets,
        cell=rng.integers(0, 2, num_rows).astype(np.int32),
        token_ids=rng.integers(0, VOCAB_SIZE, total).astype(np.int32),
        loss_mask=(position >= 4) & (rng.random(total) < 0.8),
        rollout_logprobs=-rng.random(total).astype(np.float32) * 4,
        teacher_logprobs=-rng.random(total).astype(np.float32) * 12,
        weight_version=np.zeros(total, np.int32),
        cells=CELLS,
    )


def load_folder(folder: Path) -> dict[str, Any]:
    """Every tensor of a Hugging Face folder."""
    from safetensors.torch import load_file

    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def start(config: Config):
    from megatron_mopd.mcore.layout import Layout
    from megatron_mopd.mcore.learner import Learner
    from megatron_mopd.mcore.parallel import initialize_parallel

    initialize_parallel(Layout.from_table(config.megatron), seed=0)
    return Learner(config)


def loss_and_gradients(config: Config, batch: Batch, out: Path) -> StepMetrics:
    """One update, and the gradient that it used as a Hugging Face folder. Clipping, sharded gradients: off."""
    import torch

    learner = start(config)
    metrics = learner.update(batch)
    with torch.no_grad():
        for model in learner.models:
            for parameter in model.parameters():
                parameter.copy_(parameter.main_grad)  # pyright: ignore[reportAttributeAccessIssue]
    learner.export(out)
    return metrics
