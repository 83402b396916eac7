"""The objectives over whole distributions: value and gradient are those of float64 autograd, at every layout.

The teachers' hidden states come from transformers, the teachers are narrower than the student.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import CELLS, batch_of, config_of, load_folder, start
from ranks import Pools
from safetensors.torch import save_file
from test_layouts import PLAIN, Outcome, assert_same, assert_same_gradients, run
from tiny import LAYOUTS, VOCAB_SIZE, write_checkpoint

from megatron_mopd.batch import Batch
from megatron_mopd.config import Config
from megatron_mopd.step_metrics import StepMetrics

OBJECTIVES: dict[str, dict[str, Any]] = {
    "full_kl": {"name": "full_kl"},
    "topk": {"name": "topk", "top_k": 20, "normalisation": "token"},
}
TEMPERATURE = 0.8
TOLERANCE = 3e-6
"""Of a gradient, as in test_layouts: log-ratios of a whole vocabulary are larger than a reward, and so is their
rounding."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The student, and a teacher for each cell."""
    root = tmp_path_factory.mktemp("models")
    write_checkpoint(root / "student")
    tensors = load_folder(root / "student")
    tensors["model.embed_tokens.weight"] *= 5  # see test_layouts
    save_file(tensors, root / "student" / "model.safetensors", metadata={"format": "pt"})
    for seed, cell in enumerate(CELLS, start=1):
        write_checkpoint(root / cell.effort, seed, hidden_size=48)
    return {path.name: path for path in root.iterdir()}


def objective_config(folders: dict[str, Path], objective: str, megatron: dict[str, Any], **tables: Any) -> Config:
    models = [
        {"name": c.effort, "domain": c.domain, "effort": c.effort, "checkpoint": str(folders[c.effort])} for c in CELLS
    ]
    return config_of(
        folders["student"],
        {**PLAIN, **megatron},
        teachers={"backend": "megatron", "models": models},
        objective=OBJECTIVES.get(objective, {"name": objective}),
        rollout={"max_response_tokens": 8, "temperature": TEMPERATURE},
        **tables,
    )


def scored(batch: Batch, teachers: Sequence[Path]) -> Batch:
    """With the hidden states and log-probs of each cell's teacher."""
    from transformers import Qwen3MoeForCausalLM

    models = [Qwen3MoeForCausalLM.from_pretrained(folder) for folder in teachers]
    hidden = np.zeros((len(batch.token_ids), models[0].config.hidden_size), np.float32)
    logprobs = np.zeros(len(batch.token_ids), np.float32)
    for row, (start_, end) in enumerate(zip(batch.offsets, batch.offsets[1:], strict=False)):
        ids, model = torch.from_numpy(batch.token_ids[start_:end]).long(), models[batch.cell[row]]
        if len(ids) > 1:
            with torch.no_grad():
                hidden_TD = model.model(ids[None]).last_hidden_state[0, :-1]
                logprobs_TV = (model.lm_head(hidden_TD) / TEMPERATURE).log_softmax(-1)
            hidden[start_ + 1 : end] = hidden_TD
            logprobs[start_ + 1 : end] = logprobs_TV.gather(1, ids[1:, None])[:, 0]
    hidden[~batch.loss_mask] = 0
    return dataclasses.replace(batch, teacher_hidden=hidden, teacher_logprobs=logprobs)


@pytest.fixture(scope="module")
def batch(folders: dict[str, Path]) -> Batch:
    return scored(batch_of(), [folders[cell.effort] for cell in CELLS])


@pytest.fixture(scope="module")
def single(
    ranks: Pools, folders: dict[str, Path], batch: Batch, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Outcome]:
    """One process, one micro-batch."""
    out = tmp_path_factory.mktemp("single")
    return {name: run(ranks, 1, objective_config(folders, name, {}), batch, out / name) for name in OBJECTIVES}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_loss_and_gradients_are_those_of_autograd(
    objective: str, folders: dict[str, Path], batch: Batch, single: dict[str, Outcome], tmp_path: Path
) -> None:
    """In float64 through transformers, row by row, also with respect to the logits."""
    from transformers import Qwen3MoeForCausalLM

    load = Qwen3MoeForCausalLM.from_pretrained
    student = load(folders["student"], experts_implementation="eager").double()
    teachers = [load(folders[cell.effort], experts_implementation="eager").double() for cell in CELLS]
    sums = {cell: torch.zeros((), dtype=torch.float64) for cell in CELLS}
    loss, logits = torch.zeros((), dtype=torch.float64), {cell: [] for cell in CELLS}
    top_k = OBJECTIVES[objective].get("top_k", VOCAB_SIZE)
    for row in range(len(batch)):
        one = batch.select([row])
        if one.loss_mask[1:].any():
            ids, cell = torch.from_numpy(one.token_ids).long(), CELLS[one.cell[0]]
            logits_TV = student(ids[None]).logits[0, :-1]
            logits_TV.retain_grad()
            logits[cell].append(logits_TV)
            log_p_TV = (logits_TV / TEMPERATURE).log_softmax(-1)
            with torch.no_grad():
                log_q_TV = (teachers[one.cell[0]](ids[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
            terms_TV = log_p_TV.exp() * (log_p_TV - log_q_TV) - log_p_TV.exp() + log_q_TV.exp()
            terms_T = terms_TV.gather(1, log_q_TV.topk(top_k).indices).sum(-1)[torch.from_numpy(one.loss_mask[1:])]
            sums[cell] = sums[cell] + terms_T.sum().detach()
            whole = len(batch) * len(terms_T) if objective == "full_kl" else batch.loss_tokens.sum()
            loss = loss + terms_T.sum() / whole
    loss.backward()
    got = single[objective]
    assert got.metrics.loss == pytest.approx(loss.item(), rel=1e-5)
    assert got.metrics.loss > 0.1
    for cell, metrics in got.metrics.cells.items():
        assert metrics.kl.value * metrics.kl.count == pytest.approx(sums[cell].item(), rel=1e-5)
        assert metrics.kl.count == metrics.tokens
        norm = torch.cat([part.grad for part in logits[cell]]).norm() * TEMPERATURE  # ours: of logits / temperature
        assert metrics.logit_grad_norm == pytest.approx(norm.item(), rel=1e-4)
    with torch.no_grad():
        for parameter in student.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    student.float().save_pretrained(tmp_path)
    assert_same_gradients(got.gradients, load_folder(tmp_path), TOLERANCE)


@pytest.mark.parametrize("layout", ["TP2xEP2", "PP2", "CP2", "DP2", "TP2xPP2"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_layout_agrees(
    objective: str,
    layout: str,
    ranks: Pools,
    folders: dict[str, Path],
    batch: Batch,
    single: dict[str, Outcome],
    tmp_path: Path,
) -> None:
    """In micro-batches of two rows, some of which have nothing to train on."""
    size, megatron = LAYOUTS[layout]
    config = objective_config(folders, objective, megatron, learner={"micro_batch_tokens": 40})
    assert_same(run(ranks, size, config, batch, tmp_path / "gradients"), single[objective], TOLERANCE)


def update(config: Config, batch: Batch) -> StepMetrics:
    return start(config).update(batch)


@pytest.mark.parametrize("layout", ["single", "TP2xEP2"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_student_equal_to_its_teachers_learns_nothing(
    objective: str, layout: str, ranks: Pools, folders: dict[str, Path]
) -> None:
    size, megatron = LAYOUTS[layout]
    itself = dict.fromkeys(folders, folders["student"])
    batch = scored(batch_of(), [folders["student"]] * len(CELLS))
    for metrics in ranks(size)(update, objective_config(itself, objective, megatron), batch):
        assert abs(metrics.loss) < 1e-6
        assert metrics.grad_norm < 1e-6
        assert abs(metrics.mean("reverse_kl")) < 1e-4


def error_of(config: Config, batch: Batch) -> str:
    from megatron_mopd.errors import UserError

    try:
        update(config, batch)
    except UserError as error:
        return str(error)
    return ""


def test_what_cannot_be_compared_is_refused(
    ranks: Pools, folders: dict[str, Path], batch: Batch, tmp_path: Path
) -> None:
    config = objective_config(folders, "full_kl", {})
    (error,) = ranks(1)(error_of, config, batch_of())
    assert "the batch of step 1 has no hidden states" in error
    write_checkpoint(tmp_path, vocab_size=VOCAB_SIZE + 6)
    (error,) = ranks(1)(error_of, objective_config(folders | {"high": tmp_path}, "full_kl", {}), batch)
    assert f"teacher high has {VOCAB_SIZE + 6} vocabulary rows, the student {VOCAB_SIZE}" in error


def logprobs_by_head(
    config: Config, teachers: Sequence[str], prompts: list[np.ndarray], responses: list[np.ndarray]
) -> list[tuple[np.ndarray, np.ndarray, torch.dtype]]:
    """Of each teacher: its own log-probs and those of its hidden states through the student's copy of its output layer,
    on the ranks of the last stage; and the dtype of the hidden states."""
    import torch.distributed as dist
    from test_teacher_ranks import start_ranks

    from megatron_mopd.mcore.microbatch import from_bits
    from megatron_mopd.mcore.teacher_heads import TeacherHeads
    from megatron_mopd.mcore.vocab_slice import VocabSlice
    from megatron_mopd.token_rows import TokenRows

    ranks, found = start_ranks(config), []
    head: Any = ranks.models[-1].output_layer if ranks.models[-1].post_process else None
    heads = None if head is None else TeacherHeads(config.teachers.models, head)
    for teacher in config.teachers.models:
        if teacher.name not in teachers:
            continue
        scores: list[Any] = [ranks.score_hidden(teacher.name, TokenRows.of(prompts, responses))]
        dist.broadcast_object_list(scores, src=0)
        if head is None or heads is None:
            continue
        hidden_MD = from_bits(scores[0].hidden)
        weight_vD = heads.weights[teacher.cell].to(hidden_MD.dtype)
        target_M = torch.from_numpy(np.concatenate(responses)).long()
        of_teacher = VocabSlice(weight_vD, head.vocabulary.start, config.rollout.temperature, head.tp_group, block=100)
        got = of_teacher.score(hidden_MD, target_M, chunk=100).logprobs_T.numpy()
        found.append((scores[0].logprobs, got, hidden_MD.dtype))
    return found


@pytest.mark.parametrize(
    ("layout", "precision"), [("TP2xEP2", {}), ("PP2", {}), ("CP2", {}), ("DP2", {"bf16": True}), ("TP2xPP2", {})]
)
def test_hidden_states_of_the_service_and_the_head_give_its_own_log_probs(
    layout: str, precision: dict[str, Any], ranks: Pools, folders: dict[str, Path]
) -> None:
    from test_teacher_ranks import service_config, trajectories

    size, megatron = LAYOUTS[layout]
    teachers = {cell.effort: folders[cell.effort] for cell in CELLS[:2]}
    rollout = {"max_response_tokens": 8, "temperature": TEMPERATURE}
    config = service_config(teachers, megatron | precision, rollout=rollout)
    of_ranks = ranks(size)(logprobs_by_head, config, list(teachers), *trajectories(40))
    assert any(of_ranks)
    for of_rank in of_ranks:
        for logprobs, got, dtype in of_rank:
            np.testing.assert_allclose(got, logprobs, atol=1e-5)
            assert dtype == (torch.bfloat16 if precision else torch.float32)
        assert not of_rank or not np.array_equal(of_rank[0][0], of_rank[1][0])


def test_a_head_is_the_same_from_a_megatron_checkpoint(ranks: Pools, folders: dict[str, Path], tmp_path: Path) -> None:
    """Saved by ranks that pad the vocabulary, read by others."""
    from test_teacher_ranks import service_config, update_and_save

    size, megatron = LAYOUTS["TP2xEP2"]
    ranks(size)(update_and_save, config_of(folders["student"], megatron), tmp_path)
    served = {"folder": tmp_path / "hf", "checkpoint": folders["student"]}
    config = service_config(served, {}, checkpoints={"checkpoint": tmp_path / "step_00000001"})
    for slices in ranks(2)(slices_of_heads, config):
        assert torch.equal(slices[0], slices[1])
    want = load_folder(tmp_path / "hf")["lm_head.weight"]
    assert torch.equal(torch.cat([slices[1] for slices in ranks(2)(slices_of_heads, config)]), want)


def slices_of_heads(config: Config) -> list[torch.Tensor]:
    """Of each teacher, on a rank of a student with two tensor-parallel ones."""
    from megatron_mopd.mcore.teacher_heads import TeacherHeads

    learner = start(config_of(config.teachers.models[0].checkpoint, LAYOUTS["TP2+SP"][1]))
    head: Any = learner.models[-1].output_layer
    heads = TeacherHeads(config.teachers.models, head)
    return [heads.weights[teacher.cell] for teacher in config.teachers.models]
