"""Law 2: the loss and the gradient of a batch do not depend on the parallel layout, the micro-batch split or the order.

Float32. Gradients are compared in Hugging Face names and shapes, within 1e-6 of the largest entry of any gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import CELLS, batch_of, config_of, load_folder, loss_and_gradients, start
from ranks import Pools
from safetensors.torch import save_file
from tiny import LAYOUTS, VOCAB_SIZE, write_checkpoint

from megatron_mopd.batch import Batch
from megatron_mopd.config import Config
from megatron_mopd.step_metrics import StepMetrics
from megatron_mopd.types import Cell

PLAIN = {"use_distributed_optimizer": False, "clip_grad": 0.0}
LAYOUTS = {name: layout for name, layout in LAYOUTS.items() if name not in ("single", "ETP2", "TP4")} | {
    "DP2xEP2": (4, {"expert_model_parallel_size": 2}),
    "TP2xCP2": (4, {"tensor_model_parallel_size": 2, "context_parallel_size": 2}),
}


@dataclasses.dataclass
class Outcome:
    metrics: StepMetrics
    gradients: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder)
    # Embeddings of a trained model's size. Tiny ones before a norm blow up their own gradient and its rounding with it.
    tensors = load_folder(folder)
    tensors["model.embed_tokens.weight"] *= 5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def run(ranks: Pools, size: int, config: Config, batch: Batch, out: Path) -> Outcome:
    metrics: Sequence[StepMetrics] = ranks(size)(loss_and_gradients, config, batch, out)
    assert all(m == metrics[0] for m in metrics), "every rank reports the same"
    return Outcome(metrics[0], load_folder(out))


@pytest.fixture(scope="module")
def single(ranks: Pools, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """One process, one micro-batch."""
    return run(ranks, 1, config_of(model, PLAIN), batch_of(), tmp_path_factory.mktemp("single") / "gradients")


def assert_same_gradients(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float = 1e-6) -> None:
    assert got.keys() == want.keys()
    largest = max(float(g.abs().max()) for g in want.values())
    worst = max((float((got[name] - want[name]).abs().max()) / largest, name) for name in want)
    assert worst[0] < tolerance, worst


def assert_same(got: Outcome, want: Outcome, tolerance: float = 1e-6) -> None:
    assert got.metrics.loss == pytest.approx(want.metrics.loss, rel=1e-6)
    assert got.metrics.grad_norm == pytest.approx(want.metrics.grad_norm, rel=1e-5)
    assert_same_gradients(got.gradients, want.gradients, tolerance)
    for cell, metrics in want.metrics.cells.items():
        for field in dataclasses.fields(metrics):
            value, expected = (getattr(m, field.name) for m in (got.metrics.cells[cell], metrics))
            np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-7, err_msg=field.name)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("micro_batch_tokens", [10_000, 40])
def test_loss_and_gradients_are_those_of_one_process(
    layout: str, micro_batch_tokens: int, ranks: Pools, model: Path, single: Outcome, tmp_path: Path
) -> None:
    size, megatron = LAYOUTS[layout]
    config = config_of(model, {**PLAIN, **megatron}, learner={"micro_batch_tokens": micro_batch_tokens})
    assert_same(run(ranks, size, config, batch_of(), tmp_path / "gradients"), single)


@pytest.mark.parametrize("micro_batch_tokens", [1, 25, 60])
def test_loss_is_invariant_to_the_micro_batch_split(
    micro_batch_tokens: int, ranks: Pools, model: Path, single: Outcome, tmp_path: Path
) -> None:
    config = config_of(model, PLAIN, learner={"micro_batch_tokens": micro_batch_tokens})
    got = run(ranks, 1, config, batch_of(), tmp_path / "gradients")
    assert got.metrics.num_micro_batches > 1
    assert_same(got, single)


def test_loss_is_invariant_to_the_order_of_rows(ranks: Pools, model: Path, single: Outcome, tmp_path: Path) -> None:
    batch = batch_of()
    shuffled = batch.select(np.random.default_rng(1).permutation(len(batch)).tolist())
    assert_same(run(ranks, 1, config_of(model, PLAIN), shuffled, tmp_path / "gradients"), single)


def test_a_rank_without_rows_joins_every_collective(
    ranks: Pools, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Three rows on four ranks, and more expert-parallel ranks than rows."""
    batch, folder = batch_of(6).select([3, 4, 5]), tmp_path_factory.mktemp("uneven")
    want = run(ranks, 1, config_of(model, PLAIN), batch, folder / "one")
    config = config_of(model, {**PLAIN, "expert_model_parallel_size": 4})
    assert_same(run(ranks, 4, config, batch, folder / "four"), want)


def test_token_normalisation_is_invariant_too(ranks: Pools, model: Path, single: Outcome, tmp_path: Path) -> None:
    objective = {"normalisation": "token"}
    want = run(ranks, 1, config_of(model, PLAIN, objective=objective), batch_of(), tmp_path / "one")
    config = config_of(model, PLAIN, objective=objective, learner={"micro_batch_tokens": 40})
    assert_same(run(ranks, 2, config, batch_of(), tmp_path / "two"), want)
    assert want.metrics.loss != pytest.approx(single.metrics.loss, rel=1e-3), "the two normalisations differ"


@pytest.mark.parametrize("layout", ["DP2", "TP2xPP2", "CP2"])
def test_weights_of_domains_are_invariant_too(
    layout: str, ranks: Pools, model: Path, single: Outcome, tmp_path: Path
) -> None:
    """The factors are those of the whole batch, wherever its rows go."""
    batch = dataclasses.replace(batch_of(), cells=(CELLS[0], Cell("tax", "max"), CELLS[2]))
    objective = {"domain_weights": {"law": 3.0}, "domain_balance": "inverse_deviation"}
    want = run(ranks, 1, config_of(model, PLAIN, objective=objective), batch, tmp_path / "one")
    assert want.metrics.cells[batch.cells[0]].weight > 1 > want.metrics.cells[batch.cells[1]].weight
    assert want.metrics.loss != pytest.approx(single.metrics.loss, rel=1e-3)
    size, megatron = LAYOUTS[layout]
    config = config_of(model, {**PLAIN, **megatron}, objective=objective, learner={"micro_batch_tokens": 40})
    assert_same(run(ranks, size, config, batch, tmp_path / "two"), want)


GRPO = {
    "name": "grpo",
    "beta": 0.1,
    "ratio": {"clip_low": 0.2, "clip_high": 0.3, "mask_low": 0.1, "mask_high": 10.0, "truncate_high": 2.0},
}


@pytest.mark.parametrize("layout", ["DP2", "TP2xEP2", "PP2", "CP2"])
def test_outcomes_and_ratios_are_invariant_too(
    layout: str, ranks: Pools, model: Path, single: Outcome, tmp_path: Path
) -> None:
    """An advantage stays with its row, whatever micro-batch and rank that goes to."""
    advantage = np.random.default_rng(5).standard_normal(14).astype(np.float32)
    plain = batch_of()
    near = plain.rollout_logprobs - 4  # the model is about as sure of a token as that
    batch = dataclasses.replace(plain, rollout_logprobs=near, outcome_advantage=advantage)
    want = run(ranks, 1, config_of(model, PLAIN, objective=GRPO), batch, tmp_path / "one")
    touched = want.metrics.ratio_clipped, want.metrics.ratio_masked, want.metrics.ratio_truncated
    assert all(0 < share.value < 1 for share in touched), "the fixture must reach every bound"
    assert want.metrics.loss != pytest.approx(single.metrics.loss, rel=1e-3)
    size, megatron = LAYOUTS[layout]
    config = config_of(model, {**PLAIN, **megatron}, objective=GRPO, learner={"micro_batch_tokens": 40})
    # A ratio hands the rounding of a log-prob on to the coefficient.
    assert_same(run(ranks, size, config, batch, tmp_path / "two"), want, tolerance=5e-6)


def test_a_batch_without_outcomes_is_refused(ranks: Pools, model: Path) -> None:
    with pytest.raises(Exception, match=r"has no advantages of outcomes; objective\.name=grpo needs batches"):
        ranks(1)(update_once, config_of(model, PLAIN, objective={"name": "grpo"}), batch_of())


def update_once(config: Config, batch: Batch) -> None:
    start(config).update(batch)


ALL_BALANCING_LOSSES = {
    "moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.1, 0.1],
    "moe_z_loss_coeff": 0.1,
}


@pytest.mark.parametrize("layout", ["DP2", "TP2xEP2", "PP2xVPP2", "CP2", "TP2xCP2"])
def test_balancing_losses_do_not_depend_on_the_layout(layout: str, ranks: Pools, model: Path, tmp_path: Path) -> None:
    """Nothing else to learn, no padding, and the same rows on every data-parallel rank: the same statistics."""
    lengths = np.array([9, 17, 25, 13] * 2)
    ids = np.tile(np.random.default_rng(0).integers(0, VOCAB_SIZE, 64).astype(np.int32), 2)
    zeros, mask = np.zeros(len(ids), np.float32), np.ones(len(ids), bool)
    batch = Batch(
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        cell=np.zeros(len(lengths), np.int32),
        token_ids=ids,
        loss_mask=mask,
        rollout_logprobs=zeros,
        teacher_logprobs=zeros + np.nan,
        weight_version=np.zeros(len(ids), np.int32),
        cells=CELLS,
    )
    want = run(ranks, 1, config_of(model, {**PLAIN, **ALL_BALANCING_LOSSES}), batch, tmp_path / "one")
    assert want.gradients["model.layers.0.mlp.gate.weight"].abs().max() > 1e-3
    size, megatron = LAYOUTS[layout]
    config = config_of(model, {**PLAIN, **ALL_BALANCING_LOSSES, **megatron})
    assert_same_gradients(run(ranks, size, config, batch, tmp_path / "two").gradients, want.gradients)


def weights_after_two_updates(config: Config, batch: Batch, out: Path) -> None:
    learner = start(config)
    for _ in range(2):
        learner.update(batch)
    learner.export(out)


@pytest.mark.parametrize("options", [{}, {"overlap_grad_reduce": True, "overlap_param_gather": True}])
def test_the_distributed_optimizer_updates_like_the_plain_one(
    options: dict[str, Any], ranks: Pools, model: Path, tmp_path: Path
) -> None:
    """Also with communication overlapped, where weights are still on their way when a step returns."""
    plain = config_of(model, {"use_distributed_optimizer": False})
    ranks(2)(weights_after_two_updates, plain, batch_of(), tmp_path / "plain")
    ranks(2)(weights_after_two_updates, config_of(model, options), batch_of(), tmp_path / "distributed")
    got = load_folder(tmp_path / "distributed")
    for name, tensor in load_folder(tmp_path / "plain").items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=2e-6, msg=name)


def test_loss_and_gradients_are_those_of_eq15_on_transformers(model: Path, single: Outcome, tmp_path: Path) -> None:
    """Float64 autograd through another implementation of the model, row by row; also with respect to the logits."""
    from transformers import Qwen3MoeForCausalLM

    batch = batch_of()
    reference = Qwen3MoeForCausalLM.from_pretrained(model, experts_implementation="eager").double()
    loss = torch.zeros((), dtype=torch.float64)
    logits: dict[Cell, list[torch.Tensor]] = {}
    for row in range(len(batch)):
        one = batch.select([row])
        if one.loss_mask[1:].any():
            ids = torch.from_numpy(one.token_ids).long()
            logits_TV = reference(ids[None]).logits[0, :-1]
            logits_TV.retain_grad()
            logits.setdefault(CELLS[one.cell[0]], []).append(logits_TV)
            logprobs_T = logits_TV.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            reward_T = (torch.from_numpy(one.teacher_logprobs[1:]) - logprobs_T.detach()).clamp(-5, 5)
            mask_T = torch.from_numpy(one.loss_mask[1:])
            loss = loss - (reward_T * logprobs_T)[mask_T].mean() / len(batch)
    loss.backward()
    for cell, parts in logits.items():
        norm = torch.cat([part.grad for part in parts if part.grad is not None]).norm()
        assert single.metrics.cells[cell].logit_grad_norm == pytest.approx(norm.item(), rel=1e-5)
    with torch.no_grad():
        for parameter in reference.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    reference.float().save_pretrained(tmp_path)
    assert single.metrics.loss == pytest.approx(loss.item(), rel=1e-6)
    assert_same_gradients(single.gradients, load_folder(tmp_path))


def logprobs(config: Config, batch: Batch) -> np.ndarray:
    return start(config).logprobs(batch)


def update_against_itself(config: Config, batch: Batch) -> StepMetrics:
    """An update whose teacher and rollout are the learner's own forward pass."""
    learner = start(config)
    own = learner.logprobs(batch)
    return learner.update(dataclasses.replace(batch, teacher_logprobs=own, rollout_logprobs=own))


def test_logprobs_are_those_of_transformers(ranks: Pools, model: Path) -> None:
    """Law 12, with the sampling temperature and a vocabulary that is padded."""
    from transformers import Qwen3MoeForCausalLM

    batch, temperature = batch_of(), 0.7
    rollout = {"temperature": temperature, "max_response_tokens": 8}
    reference = Qwen3MoeForCausalLM.from_pretrained(model)
    want = np.zeros(len(batch.token_ids), np.float64)
    for start_, end in zip(batch.offsets, batch.offsets[1:], strict=False):
        if end - start_ > 1:
            ids = torch.from_numpy(batch.token_ids[start_:end]).long()
            with torch.no_grad():
                logits = reference(ids[None]).logits[0, :-1].double() / temperature
            want[start_ + 1 : end] = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    for size, megatron in ((1, {}), LAYOUTS["TP2+SP"], LAYOUTS["CP2"], LAYOUTS["PP2xVPP2"]):
        for got in ranks(size)(logprobs, config_of(model, megatron, rollout=rollout), batch):
            np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("layout", ["DP2", "TP2xEP2", "PP2"])
def test_student_equal_to_teacher_gives_no_reward(layout: str, ranks: Pools, model: Path) -> None:
    """Law 3 on Megatron's side: a separate forward pass scores, and nothing is left."""
    size, megatron = LAYOUTS[layout]
    for metrics in ranks(size)(update_against_itself, config_of(model, megatron), batch_of()):
        assert abs(metrics.loss) < 1e-6
        assert set(metrics.cells) == set(CELLS[:2])
        for cell in metrics.cells.values():
            assert abs(cell.reverse_kl) < 1e-4
            assert cell.mismatch_max < 1e-4
            assert cell.clip_fraction == 0
