"""Law 6, the learner's part: save, kill and load equals never stopping, bit for bit. And what a checkpoint refuses."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_cases import batch_of, config_of, load_folder, start
from ranks import Pools
from tiny import LAYOUTS, write_checkpoint

from megatron_mopd.config import Config
from megatron_mopd.step_metrics import StepMetrics

TP2_EP2 = LAYOUTS["TP2xEP2"][1]
CASES = {
    "single": (1, {}),
    "DP2": (2, {}),
    "DP2 without the distributed optimizer": (2, {"use_distributed_optimizer": False}),
    "TP2xEP2": (2, TP2_EP2),
    "TP2xEP2 without the distributed optimizer": (2, {**TP2_EP2, "use_distributed_optimizer": False}),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
    "PP2xVPP2": LAYOUTS["PP2xVPP2"],
    "EP2 with overlap": (
        2,
        {"expert_model_parallel_size": 2, "overlap_grad_reduce": True, "overlap_param_gather": True},
    ),
}
SCHEDULE = {"lr": 2e-3, "lr_warmup_steps": 2, "lr_decay_style": "linear", "min_lr": 1e-4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def other_ranks() -> Iterator[Pools]:
    """Processes that never saw what `ranks` did."""
    pools = Pools()
    yield pools
    pools.stop()


def train(config: Config, out: Path, resume: Path | None, save_at: int | None, num_steps: int = 4) -> list[StepMetrics]:
    from megatron_mopd.mcore import checkpoint

    multiprocessing.current_process()._config["daemon"] = False  # pyright: ignore  (upstream's writers are children)
    learner = start(config)
    if resume:
        checkpoint.load(learner, resume)
    metrics = []
    while learner.step < num_steps:
        metrics.append(learner.update(batch_of(seed=learner.step)))
        if learner.step == save_at:
            checkpoint.save(learner, out.parent / "checkpoints", keep=2)
    learner.export(out)
    return metrics


def assert_same_weights(got: Path, want: Path) -> None:
    a, b = load_folder(got), load_folder(want)
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("experts", ["none", "mxfp4"])
@pytest.mark.parametrize("case", CASES)
def test_resume_is_bitwise(
    case: str, experts: str, ranks: Pools, other_ranks: Pools, model: Path, tmp_path: Path
) -> None:
    size, megatron = CASES[case]
    config = config_of(model, {**SCHEDULE, **megatron}, quantization={"experts": experts, "report_every_steps": 1})
    whole = ranks(size)(train, config, tmp_path / "whole", None, 2)[0]
    saved = tmp_path / "checkpoints" / "step_00000002"
    resumed = other_ranks(size)(train, config, tmp_path / "resumed", saved, None)[0]
    assert resumed == whole[2:]
    assert_same_weights(tmp_path / "resumed", tmp_path / "whole")


def export_loaded_weights(config: Config, saved: Path, out: Path) -> int:
    from megatron_mopd.mcore import checkpoint

    learner = start(config)
    checkpoint.load_weights(learner, saved)
    learner.export(out)
    return learner.step


@pytest.mark.parametrize("layout", ["single", "EP2", "PP2xVPP2", "TP2xPP2"])
def test_weights_load_at_another_layout(layout: str, ranks: Pools, model: Path, tmp_path: Path) -> None:
    ranks(2)(train, config_of(model, TP2_EP2), tmp_path / "saved", None, 1, 1)
    size, megatron = LAYOUTS[layout]
    saved = tmp_path / "checkpoints" / "step_00000001"
    assert ranks(size)(export_loaded_weights, config_of(model, megatron), saved, tmp_path / "loaded") == [0] * size
    assert_same_weights(tmp_path / "loaded", tmp_path / "saved")


def error_of_load(config: Config, saved: Path) -> str:
    from megatron_mopd.errors import UserError
    from megatron_mopd.mcore import checkpoint

    learner = start(config)
    try:
        checkpoint.load(learner, saved)
    except UserError as error:
        return str(error)
    return ""


def test_another_layout_or_optimizer_or_folder_is_refused(ranks: Pools, model: Path, tmp_path: Path) -> None:
    ranks(2)(train, config_of(model, {}), tmp_path / "out", None, 1, 1)
    saved = tmp_path / "checkpoints" / "step_00000001"
    refusals: tuple[tuple[int, dict[str, Any], Path, str], ...] = (
        (2, {"tensor_model_parallel_size": 2}, saved, "layout"),
        (1, {}, saved, "processes 2 and this run has 1"),
        (2, {"use_distributed_optimizer": False}, saved, "optimizer"),
        (1, {}, model, "is not a checkpoint"),
        (1, {}, tmp_path / "nothing", "is not a checkpoint"),
    )
    for size, megatron, folder, words in refusals:
        for error in ranks(size)(error_of_load, config_of(model, megatron), folder):
            assert words in error
            assert "\n" not in error


def save_three(config: Config, folder: Path) -> list[str]:
    """Names after three saves that keep two, beside the remains of a killed save and a checkpoint from which the user
    went back."""
    from megatron_mopd.mcore import checkpoint

    multiprocessing.current_process()._config["daemon"] = False  # pyright: ignore
    learner = start(config)
    assert checkpoint.latest(folder) is None
    (folder / ".step_00000002.partial").mkdir(parents=True)
    (folder / ".step_00000002.partial" / "__0_0.distcp").write_text("half")
    (folder / "step_00000009").mkdir()
    for _ in range(3):
        learner.update(batch_of())
        checkpoint.save(learner, folder, keep=2)
    assert checkpoint.latest(folder) == folder / "step_00000003"
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_checkpoints_are_kept_and_whole(ranks: Pools, model: Path, tmp_path: Path) -> None:
    names = ranks(1)(save_three, config_of(model, {}), tmp_path / "checkpoints")[0]
    assert names == ["latest", "step_00000002", "step_00000003", "step_00000009"]


def publish_at(config: Config, folder: Path, steps: tuple[int, ...]) -> list[list[str]]:
    """Names of the weight folders after each publication."""
    from megatron_mopd.mcore.publish import FolderPublisher

    learner, publisher, names = start(config), FolderPublisher(folder), []
    for learner.step in steps:
        published = Path(publisher.publish(learner))
        assert (published / "config.json").is_file()
        names.append(sorted(path.name for path in published.parent.iterdir()))
    return names


def test_weights_of_this_step_and_the_one_before_are_kept(ranks: Pools, model: Path, tmp_path: Path) -> None:
    """Also by a run that has gone back to a checkpoint, and finds the newer ones of its past."""
    names = ranks(1)(publish_at, config_of(model, {}), tmp_path, (0, 1, 2, 3, 2, 3))[0]
    v0, v1, v2, v3 = (f"v{i:08d}" for i in range(4))
    assert names == [[v0], [v0, v1], [v1, v2], [v2, v3], [v2], [v2, v3]]
