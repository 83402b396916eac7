"""What the learner does around the gradient: schedule, several models in one process group, options, refusals."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import batch_of, config_of, load_folder, loss_and_gradients, start
from ranks import Pools
from tiny import VOCAB_SIZE, write_checkpoint
from torch import Tensor

from megatron_mopd.batch import Batch
from megatron_mopd.config import Config
from megatron_mopd.step_metrics import StepMetrics

PLAIN = {"use_distributed_optimizer": False, "clip_grad": 0.0}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints of one architecture."""
    folder = tmp_path_factory.mktemp("models")
    for seed in range(2):
        write_checkpoint(folder / str(seed), seed)
    return folder / "0", folder / "1"


def learning_rates(config: Config) -> list[float]:
    learner = start(config)
    return [learner.update(batch_of()).learning_rate for _ in range(config.run.num_steps)]


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        ({"lr_decay_style": "linear"}, [1 / 2, 1, 3 / 4, 1 / 2, 1 / 4]),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_style": "linear", "wsd_decay_steps": 3}, [1 / 2, 1, 1, 2 / 3, 1 / 3]),
        ({}, [1 / 2, 1, 1, 1, 1]),
    ],
    ids=["linear", "WSD", "constant"],
)
def test_no_step_runs_at_a_learning_rate_of_zero(
    schedule: dict[str, Any], shares: list[float], ranks: Pools, models: tuple[Path, Path]
) -> None:
    megatron = {"lr": 1.0e-3, "lr_warmup_steps": 2, **schedule}
    rates = ranks(1)(learning_rates, config_of(models[0], megatron, run={"folder": "unused", "num_steps": 5}))[0]
    np.testing.assert_allclose(rates, np.array(shares) * 1e-3, rtol=1e-6)


def one_update(config: Config, out: Path) -> StepMetrics:
    learner = start(config)
    metrics = learner.update(batch_of())
    learner.export(out)
    return metrics


def test_a_step_is_adamw_on_the_clipped_gradient(ranks: Pools, models: tuple[Path, Path], tmp_path: Path) -> None:
    """At warm-up's first rate, without weight decay on norms; in the first step m / sqrt(v) is the sign of g."""
    clip, eps, rate, decay = 0.05, 1e-4, 2e-3 / 4, 0.1
    adam = {"lr": 2e-3, "lr_warmup_steps": 4, "weight_decay": decay, "adam_eps": eps, "clip_grad": clip}
    tp2 = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    ranks(2)(loss_and_gradients, config_of(models[0], {**tp2, **PLAIN}), batch_of(), tmp_path / "gradient")
    metrics = ranks(2)(one_update, config_of(models[0], {**tp2, **adam}), tmp_path / "after")[0]
    before, after = load_folder(models[0]), load_folder(tmp_path / "after")
    gradient = {name: g.double() for name, g in load_folder(tmp_path / "gradient").items()}
    norm = float(sum(g.square().sum() for g in gradient.values())) ** 0.5
    assert metrics.grad_norm == pytest.approx(norm, rel=1e-5)
    assert norm > clip, "the fixture must reach the bound"
    for name, g in gradient.items():
        g = g * clip / norm
        kept = before[name].double() * (1 - rate * decay * (g.ndim > 1))
        torch.testing.assert_close(
            after[name].double(), kept - rate * g / (g.abs() + eps), rtol=1e-6, atol=1e-6, msg=name
        )


def train_one_after_another(config: Config, other: Path, out: Path) -> list[StepMetrics]:
    learner = start(config)
    learner.update(batch_of())
    learner.load_hf(other)
    assert learner.step == 0
    metrics = [learner.update(batch_of(seed=i)) for i in range(2)]
    learner.export(out)
    return metrics


def train_alone(config: Config, out: Path) -> list[StepMetrics]:
    learner = start(config)
    metrics = [learner.update(batch_of(seed=i)) for i in range(2)]
    learner.export(out)
    return metrics


@pytest.mark.parametrize("overlap", [False, True])
def test_a_second_model_trains_as_if_it_were_the_first(
    overlap: bool, ranks: Pools, models: tuple[Path, Path], tmp_path: Path
) -> None:
    options = {"expert_model_parallel_size": 2, "overlap_grad_reduce": overlap, "overlap_param_gather": overlap}
    after = ranks(2)(train_one_after_another, config_of(models[0], options), models[1], tmp_path / "after")
    alone = ranks(2)(train_alone, config_of(models[1], options), tmp_path / "alone")
    assert after == alone
    want, got = load_folder(tmp_path / "alone"), load_folder(tmp_path / "after")
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_recomputed_activations_give_the_same_gradient(ranks: Pools, models: tuple[Path, Path], tmp_path: Path) -> None:
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    tp2 = {"tensor_model_parallel_size": 2, **PLAIN}
    ranks(2)(loss_and_gradients, config_of(models[0], tp2), batch_of(), tmp_path / "kept")
    ranks(2)(loss_and_gradients, config_of(models[0], {**tp2, **recompute}), batch_of(), tmp_path / "again")
    want, got = load_folder(tmp_path / "kept"), load_folder(tmp_path / "again")
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-6, msg=name)


def test_sft_is_the_mean_negative_logprob(ranks: Pools, models: tuple[Path, Path], tmp_path: Path) -> None:
    objective = {"name": "sft", "normalisation": "token"}
    config = config_of(models[0], {"expert_model_parallel_size": 2}, objective=objective)
    for loss, logprobs in ranks(2)(sft_loss, config, batch_of()):
        batch = batch_of()
        first = batch.offsets[:-1][batch.lengths > 0]
        trained = batch.loss_mask.copy()
        trained[first] = False
        assert loss == pytest.approx(-logprobs[trained].mean(), rel=1e-6)


def sft_loss(config: Config, batch: Batch) -> tuple[float, np.ndarray]:
    learner = start(config)
    logprobs = learner.logprobs(batch)
    metrics = learner.update(batch)
    assert all(c.reverse_kl == c.mismatch.value == 0 for c in metrics.cells.values())
    return metrics.loss, logprobs


def test_load_balancing_loss_does_not_depend_on_the_loss_tokens(
    ranks: Pools, models: tuple[Path, Path], tmp_path: Path
) -> None:
    """With nothing to learn, what is left is the gradient of the balancing loss: equal for any mask."""
    balance = {**PLAIN, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
    gradients = []
    for name, trained in (("all", slice(None)), ("half", slice(None, None, 2))):
        mask = np.zeros_like(batch_of().loss_mask)
        mask[trained] = batch_of().loss_mask[trained]
        batch = dataclasses.replace(batch_of(), loss_mask=mask, teacher_logprobs=np.full(len(mask), np.nan, np.float32))
        ranks(1)(loss_and_gradients, config_of(models[0], balance), batch, tmp_path / name)
        gradients.append(load_folder(tmp_path / name))
    router = "model.layers.0.mlp.gate.weight"
    assert gradients[0][router].abs().max() > 1e-4
    torch.testing.assert_close(gradients[0][router], gradients[1][router])
    assert not gradients[0]["lm_head.weight"].any()


def metrics_with_non_finite_teachers(config: Config) -> StepMetrics:
    teacher = batch_of().teacher_logprobs.copy()
    teacher[batch_of().loss_mask.nonzero()[0][:3]] = [np.nan, np.inf, -np.inf]
    return start(config).update(dataclasses.replace(batch_of(), teacher_logprobs=teacher))


def test_non_finite_teacher_logprobs_are_left_out_and_counted(ranks: Pools, models: tuple[Path, Path]) -> None:
    metrics = ranks(2)(metrics_with_non_finite_teachers, config_of(models[0], {}))[0]
    assert sum(c.masked_tokens for c in metrics.cells.values()) == 3
    assert metrics.loss_tokens + 3 == batch_of().loss_tokens.sum()
    assert np.isfinite([metrics.loss, metrics.grad_norm]).all()


def logits_in_float32() -> tuple[float, float]:
    """Worst error of the head's log-probs, and of those of bfloat16 logits, on bfloat16 inputs against float64."""
    from megatron_mopd.mcore.vocab_slice import VocabSlice

    g = torch.Generator().manual_seed(0)
    hidden_TD = torch.randn(64, 128, generator=g).bfloat16()
    weight_VD = torch.randn(100, 128, generator=g).bfloat16()
    target_T = torch.randint(100, (64,), generator=g)

    def picked(logits_TV: Tensor) -> Tensor:
        return logits_TV.double().log_softmax(-1).gather(-1, target_T[:, None])[:, 0]

    exact_T = picked(hidden_TD.double() @ weight_VD.double().t())
    head_T = VocabSlice(weight_VD, 0, 1.0, None, 32).score(hidden_TD, target_T, 16).logprobs_T
    assert head_T.dtype == torch.float32
    rounded_T = picked(hidden_TD @ weight_VD.t())
    return float((head_T - exact_T).abs().max()), float((rounded_T - exact_T).abs().max())


def test_logits_are_accumulated_in_float32(ranks: Pools) -> None:
    """Law 12, for a model in bfloat16."""
    head, rounded = ranks(1)(logits_in_float32)[0]
    assert head < 1e-4
    assert rounded > 1e-2, "the control must show what rounding costs"


def train_in_bfloat16(config: Config) -> list[StepMetrics]:
    learner = start(config)
    return [learner.update(batch_of()) for _ in range(3)]


def test_a_bfloat16_student_learns(ranks: Pools, models: tuple[Path, Path]) -> None:
    options = {"bf16": True, "tensor_model_parallel_size": 2, "lr": 1e-2}
    sft = {"objective": {"name": "sft"}}
    of_bf16 = ranks(2)(train_in_bfloat16, config_of(models[0], options, **sft))[0]
    of_float32 = ranks(2)(train_in_bfloat16, config_of(models[0], {**options, "bf16": False}, **sft))[0]
    assert of_bf16[0].loss == pytest.approx(of_float32[0].loss, rel=0.02)
    assert of_bf16[2].loss < of_bf16[0].loss - 0.5


def error_of(config: Config, change: str) -> str:
    from megatron_mopd.errors import UserError

    batch = batch_of()
    changed = {
        "nothing": {},
        "token": {"token_ids": np.where(np.arange(len(batch.token_ids)) == 9, VOCAB_SIZE, batch.token_ids)},
    }
    try:
        learner = start(config)
        if change == "weights":
            with torch.no_grad():
                next(learner.models[0].parameters()).fill_(float("nan"))
        learner.update(dataclasses.replace(batch, **changed.get(change, {})))
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("megatron", "change", "words"),
    [
        ({}, "token", f"token id {VOCAB_SIZE}, and the student's vocabulary has {VOCAB_SIZE}"),
        ({}, "weights", "the loss of step 1 is nan"),
        ({"calculate_per_token_loss": False}, "nothing", "calculate_per_token_loss cannot be set"),
        ({"mtp_num_layers": 1}, "nothing", "mtp_num_layers cannot be set"),
        ({"optimizer": "lion"}, "nothing", "supported: adam, sgd"),
        ({"lr_warmup_steps": 99}, "nothing", "OptimizerParamScheduler refuses its options"),
        ({"max_lr": 1.0}, "nothing", "max_lr cannot be set: it follows from megatron.lr"),
        ({"lr": None}, "nothing", "megatron.lr is missing"),
    ],
)
def test_what_cannot_work_is_one_line(
    megatron: dict[str, Any], change: str, words: str, ranks: Pools, models: tuple[Path, Path]
) -> None:
    for error in ranks(1)(error_of, config_of(models[0], megatron), change):
        assert words in error
        assert "\n" not in error
