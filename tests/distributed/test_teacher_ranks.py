"""The ranks of the teacher service: what they score is what transformers scores, whoever else is served there."""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import batch_of, config_of
from ranks import Pools
from tiny import LAYOUTS, VOCAB_SIZE, write_checkpoint

from megatron_mopd.config import Config
from megatron_mopd.quantization.formats import fake_quantize
from megatron_mopd.resume import QUANTIZATION, write_facts
from megatron_mopd.token_rows import TokenRows

TEACHERS = ("a", "b", "c")
TEMPERATURES = (1.0, 0.7)
NUM_TRAJECTORIES = 204

Rows = list[np.ndarray]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("teachers")
    for seed, name in enumerate(TEACHERS):
        write_checkpoint(root / name, seed)
    return {name: root / name for name in TEACHERS}


def trajectories(count: int, seed: int = 0) -> tuple[Rows, Rows]:
    """Prompts of 1 to 40 tokens; responses of 0, 1, 2, ... tokens, every twentieth of hundreds; the last vocabulary id
    in most."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, VOCAB_SIZE, n).astype(np.int32) for n in rng.integers(1, 41, count)]
    lengths = [i % 20 if i % 20 != 19 else 150 + i for i in range(count)]
    responses = [rng.integers(0, VOCAB_SIZE, n).astype(np.int32) for n in lengths]
    for response in responses:
        response[-1:] = VOCAB_SIZE - 1
    return prompts, responses


def service_config(folders: Mapping[str, Path], megatron: dict[str, Any], **tables: Any) -> Config:
    """`tables` are those of the configuration; `checkpoints` of it are Megatron checkpoints by teacher."""
    checkpoints = tables.pop("checkpoints", {})
    models = [
        {"name": name, "domain": "law", "effort": name, "checkpoint": str(folder)}
        | ({"megatron_checkpoint": str(checkpoints[name])} if name in checkpoints else {})
        for name, folder in folders.items()
    ]
    service = {"megatron": megatron, "micro_batch_tokens": 600, **tables.pop("service", {})}
    return config_of(
        next(iter(folders.values())),
        {},
        teachers={"backend": "megatron", "models": models},
        service=service,
        **tables,
    )


def start_ranks(config: Config):
    from megatron_mopd.mcore.parallel import initialize_parallel
    from megatron_mopd.mcore.teacher_ranks import TeacherRanks, service_layout

    initialize_parallel(service_layout(config), seed=0)
    return TeacherRanks(config)


def scored(ranks: Any, teacher: str, prompts: Rows, responses: Rows) -> Rows | None:
    """The log-probs of each row, on rank 0."""
    scores = ranks.score(teacher, TokenRows.of(prompts, responses))
    return None if scores is None else np.split(scores.logprobs, np.cumsum([len(r) for r in responses])[:-1])


def score(configs: Sequence[Config], teachers: Sequence[str], prompts: Rows, responses: Rows) -> list[Rows | None]:
    """The scores of each configuration by each teacher in order."""
    return [scored(ranks, name, prompts, responses) for ranks in map(start_ranks, configs) for name in teachers]


@pytest.fixture(scope="module")
def reference(folders: dict[str, Path]) -> dict[float, Rows]:
    """What transformers gives for `trajectories`, by temperature."""
    from transformers import Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM.from_pretrained(folders["a"])
    want: dict[float, Rows] = {temperature: [] for temperature in TEMPERATURES}
    for prompt, response in zip(*trajectories(NUM_TRAJECTORIES), strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, response])).long()
        with torch.no_grad():
            logits = model(ids[None]).logits[0, len(prompt) - 1 : -1].double()
        for temperature, rows in want.items():
            logprobs = (logits / temperature).log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0]
            rows.append(logprobs.numpy())
    return want


@pytest.mark.parametrize("layout", ["TP2xEP2", "PP2", "DP2", "CP2", "TP2xPP2"])
def test_scores_are_those_of_transformers(
    layout: str, ranks: Pools, folders: dict[str, Path], reference: dict[float, Rows]
) -> None:
    size, megatron = LAYOUTS[layout]
    prompts, responses = trajectories(NUM_TRAJECTORIES)
    configs = [
        service_config({"a": folders["a"]}, megatron, rollout={"temperature": t, "max_response_tokens": 8})
        for t in TEMPERATURES
    ]
    of_first, *of_others = ranks(size)(score, configs, ["a"], prompts, responses)
    assert of_others == [[None] * len(configs)] * (size - 1)
    for temperature, got in zip(TEMPERATURES, of_first, strict=True):
        assert [len(row) for row in got] == [len(response) for response in responses]
        for row, want in zip(got, reference[temperature], strict=True):
            assert row.dtype == np.float32
            np.testing.assert_allclose(row, want, atol=1e-5)


def test_bfloat16_scores_are_near(ranks: Pools, folders: dict[str, Path], reference: dict[float, Rows]) -> None:
    """Weights and activations are rounded, and the logits are not: none is far off, and the mean is right."""
    size, megatron = LAYOUTS["PP2"]
    config = service_config({"a": folders["a"]}, {"bf16": True, **megatron})
    prompts, responses = trajectories(NUM_TRAJECTORIES)
    (got,) = ranks(size)(score, [config], ["a"], prompts[:40], responses[:40])[0]
    error = np.concatenate(got) - np.concatenate(reference[1.0][:40])
    assert 1e-3 < np.abs(error).mean() < 0.1
    assert abs(error.mean()) < 0.01


def take_turns(config: Config, prompts: Rows, responses: Rows) -> tuple[list[Rows | None], list[tuple[Any, ...]]]:
    """Scores of a, b, c, a, b, c, a; and after each which teachers are on the device and in host memory."""
    ranks, scores, places = start_ranks(config), [], []
    for name in (*TEACHERS, *TEACHERS, "a"):
        scores.append(scored(ranks, name, prompts, responses))
        places.append((ranks.weights.resident, ranks.weights.offloaded))
    return scores, places


TIERS = {
    "all resident": ((None, None), (("b", "c", "a"), ())),
    "one resident, others offloaded": ((1, None), (("a",), ("a", "b", "c"))),
    "one resident, one offloaded, others read again": ((1, 1), (("a",), ("c",))),
    "two resident, others read again": ((2, 0), (("c", "a"), ())),
}


@pytest.mark.parametrize("layout", ["TP2xEP2", "PP2xVPP2"])
def test_a_teacher_that_comes_back_scores_the_same_bits(layout: str, ranks: Pools, folders: dict[str, Path]) -> None:
    size, megatron = LAYOUTS[layout]
    rows = trajectories(20)
    scores = {}
    for name, ((resident, offloaded), at_the_end) in TIERS.items():
        limits = {"resident_teachers": resident, "offloaded_teachers": offloaded}
        results = ranks(size)(take_turns, service_config(folders, megatron, service=limits), *rows)
        assert [{places[-1] for _, places in results}] == [{at_the_end}], name
        scores[name] = [np.concatenate(row) for row in results[0][0]]
    first = scores["all resident"][:3]
    for name, visits in scores.items():
        for i, got in enumerate(visits):
            np.testing.assert_array_equal(got, first[i % 3], err_msg=name)
    assert len({got.tobytes() for got in first}) == 3, "teachers do not differ"


def update_and_save(config: Config, folder: Path) -> None:
    """A checkpoint in folder/step_00000001, and the same weights as a Hugging Face folder in folder/hf."""
    from learner_cases import start

    from megatron_mopd.mcore import checkpoint

    multiprocessing.current_process()._config["daemon"] = False  # pyright: ignore  (upstream's writers are children)
    learner = start(config)
    learner.update(batch_of())
    checkpoint.save(learner, folder, keep=1)
    learner.export(folder / "hf")


@pytest.mark.parametrize(
    ("saved_at", "served_at", "experts"),
    [
        ("TP2xEP2", "PP2xVPP2", "none"),
        ("PP2xVPP2", "TP2+ETP2", "none"),
        ("EP2", "CP2", "none"),
        ("TP2xEP2", "PP2", "mxfp4"),
    ],
)
def test_a_megatron_checkpoint_of_another_layout_equals_its_folder(
    saved_at: str, served_at: str, experts: str, ranks: Pools, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Also one that was trained with quantized experts, whose weights are served on the grid."""
    size, megatron = LAYOUTS[saved_at]
    ranks(size)(update_and_save, config_of(folders["a"], megatron, quantization={"experts": experts}), tmp_path)
    size, megatron = LAYOUTS[served_at]
    served = {"folder": tmp_path / "hf", "checkpoint": folders["a"], "before": folders["a"]}
    config = service_config(served, megatron, checkpoints={"checkpoint": tmp_path / "step_00000001"})
    folder, checkpoint, before = ranks(size)(score, [config], list(served), *trajectories(20))[0]
    for i, row in enumerate(folder):
        np.testing.assert_array_equal(checkpoint[i], row)
    assert not np.array_equal(np.concatenate(before), np.concatenate(folder))


def hashes_around_scoring(config: Config, prompts: Rows, responses: Rows) -> tuple[list[int], list[int]]:
    """Of a learner's parameters, optimizer state and generators, and of each teacher's weights: before and after."""
    from learner_cases import start

    learner = start(config)
    learner.update(batch_of())
    ranks = start_ranks_beside(config)

    def digest(tensors: Sequence[torch.Tensor]) -> int:
        return hash(b"".join(t.detach().contiguous().view(torch.uint8).numpy().tobytes() for t in tensors))

    def digests() -> list[int]:
        found = [digest([p for model in learner.models for p in model.parameters()])]
        found.append(digest([t for group in learner.optimizer.param_groups for t in group["params"]]))
        found.append(digest([torch.get_rng_state()]))
        for name in TEACHERS:
            ranks.weights.switch_to(name)
            found.append(digest([t for model in ranks.models for t in model.state_dict().values() if t is not None]))
        return found

    before = digests()
    for name in (*TEACHERS, "a"):
        scored(ranks, name, prompts, responses)
    return before, digests()


def start_ranks_beside(config: Config):
    """In the groups of the learner."""
    from megatron_mopd.mcore.teacher_ranks import TeacherRanks

    return TeacherRanks(config)


@pytest.mark.parametrize("resident", [None, 1])
def test_scoring_changes_no_byte_of_any_weights(resident: int | None, ranks: Pools, folders: dict[str, Path]) -> None:
    """Law 11."""
    size, megatron = LAYOUTS["TP2xEP2"]
    config = service_config(folders, megatron, service={"resident_teachers": resident})
    config = config.model_copy(update={"megatron": {"lr": 1e-3, **megatron}})
    for before, after in ranks(size)(hashes_around_scoring, config, *trajectories(20)):
        assert after == before
        assert len(set(before)) == len(before)


def error_of(config: Config) -> str:
    from megatron_mopd.errors import UserError

    try:
        start_ranks(config)
    except UserError as error:
        return str(error)
    return ""


def test_teachers_that_cannot_share_a_model_are_refused(ranks: Pools, folders: dict[str, Path], tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "wide", num_experts_per_tok=3)
    served = {"a": folders["a"], "wide": tmp_path / "wide"}
    (error,) = ranks(1)(error_of, service_config(served, {}))
    assert "teachers a and wide are of different architectures" in error
    assert "\n" not in error
    (error,) = ranks(1)(error_of, config_of(folders["a"], {}))
    assert "teachers.backend=megatron" in error


@pytest.mark.parametrize(
    ("megatron", "words"),
    [
        ({"tensor_model_parallel_size": 2}, "1 processes do not divide"),
        ({"fp8": "hybrid"}, "fp8_recipe"),
        ({"fp8": "hybrid", "fp8_recipe": "blockwise"}, "needs a GPU"),
        ({"cuda_graph_impl": "local"}, "cuda_graph_impl"),
        ({"hidden_size": 32}, "follows from the checkpoint"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(
    megatron: dict[str, Any], words: str, ranks: Pools, folders: dict[str, Path]
) -> None:
    (error,) = ranks(1)(error_of, service_config({"a": folders["a"]}, megatron))
    assert words in error
    assert "service.megatron" in error or "config.json" in error


def errors_of_batches(config: Config, batches: Sequence[tuple[str, Rows, Rows]]) -> list[str]:
    """What each batch of a teacher is refused with, or ""."""
    from megatron_mopd.errors import UserError

    ranks, errors = start_ranks(config), []
    for batch in batches:
        try:
            scored(ranks, *batch)
            errors.append("")
        except UserError as error:
            errors.append(str(error))
    return errors


def test_a_bad_batch_or_teacher_fails_alone(ranks: Pools, folders: dict[str, Path], tmp_path: Path) -> None:
    """The ranks stay together: the batch after it is scored."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folders["b"], tmp_path / "huge")
    tensors = load_file(tmp_path / "huge" / "model.safetensors")
    tensors["lm_head.weight"].fill_(3e38)
    save_file(tensors, tmp_path / "huge" / "model.safetensors", metadata={"format": "pt"})
    one, none, foreign = (np.array(ids, np.int32) for ids in ([1], [], [VOCAB_SIZE]))
    config = service_config({"a": folders["a"], "huge": tmp_path / "huge"}, {})
    batches = [
        ("a", [none], [one]),
        ("a", [one], [foreign]),
        ("a", [one, none], [none, none]),
        ("huge", [one, one], [none, one]),
        ("a", [one], [one]),
    ]
    first, second = ranks(2)(errors_of_batches, config, batches)
    assert "teacher a, row 0: an empty prompt" in first[0]
    assert f"none of id {VOCAB_SIZE}" in first[1]
    assert first[3] == "teacher huge gives a log-prob that is not finite for row 1 of 2"
    assert [bool(error) for error in first] == [True, True, False, True, False]
    assert second == [*first[:3], "", ""]


def errors_around_a_change(config: Config, replacement: Path, prompts: Rows, responses: Rows) -> list[str]:
    """Of a, b and c in turns after the files of a have changed."""
    import torch.distributed as dist

    from megatron_mopd.errors import UserError

    ranks, errors = start_ranks(config), []
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.copytree(replacement, config.teachers.models[0].checkpoint, dirs_exist_ok=True)
    dist.barrier()
    for name in ("a", "b", "a", "c", "b"):
        try:
            scored(ranks, name, prompts, responses)
            errors.append("")
        except UserError as error:
            errors.append(str(error))
    return errors


def test_files_that_have_changed_are_refused(ranks: Pools, folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["a"], tmp_path / "a")
    write_checkpoint(tmp_path / "other", seed=7)
    limits = {"resident_teachers": 1, "offloaded_teachers": 0}
    size, megatron = LAYOUTS["TP2xEP2"]
    config = service_config({**folders, "a": tmp_path / "a"}, megatron, service=limits)
    for errors in ranks(size)(errors_around_a_change, config, tmp_path / "other", *trajectories(8)):
        assert [bool(error) for error in errors] == [True, False, True, False, False]
        assert "teacher a: its files hold other weights" in errors[0]


def quantized(config: Config) -> tuple[list[bool], list[bool]]:
    """Which teachers have quantized experts; and how the model is built for a service that is asked for FP8."""
    from unittest.mock import patch

    from megatron_mopd.mcore import teacher_ranks
    from megatron_mopd.mcore.teacher_weights import has_quantized_experts

    class Built(Exception):
        """Far enough: FP8 needs a GPU."""

    asked: list[bool] = []

    def build_model(table: dict[str, Any], hf_config: dict[str, Any], with_quantized_experts: bool) -> None:
        asked.append(with_quantized_experts)
        raise Built

    for precision in ({}, {"fp8": "e4m3", "fp8_recipe": "tensorwise"}):
        table = config.service.model_copy(update={"megatron": precision})
        with patch.object(teacher_ranks, "build_model", build_model), pytest.raises(Built):
            start_ranks(config.model_copy(update={"service": table}))
    return [has_quantized_experts(teacher) for teacher in config.teachers.on("megatron")], asked


def test_quantized_experts_stay_out_of_the_recipes_of_a_service(
    ranks: Pools, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Those of a folder whose values are on the grid, whoever put them there, and of a checkpoint that says it."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folders["a"], tmp_path / "grid")
    tensors = load_file(tmp_path / "grid" / "model.safetensors")
    on_grid = {name: fake_quantize(x, "rceil") if ".mlp.experts." in name else x for name, x in tensors.items()}
    save_file(on_grid, tmp_path / "grid" / "model.safetensors", metadata={"format": "pt"})
    plain = service_config(folders, {})
    assert ranks(1)(quantized, plain)[0] == ([False] * len(folders), [False, False])
    mixed = service_config({"a": folders["a"], "grid": tmp_path / "grid"}, {})
    assert ranks(1)(quantized, mixed)[0] == ([False, True], [False, True])
    facts = {"step": 1, "layout": {}, "processes": 1, "optimizer": "plain"}
    for name, experts in (("a", "none"), ("b", "mxfp4")):
        (tmp_path / name).mkdir()
        write_facts(tmp_path / name, {**facts, QUANTIZATION: {"experts": experts, "rule": "even"}})
    two = {name: folders[name] for name in ("a", "b")}
    saved = service_config(two, {}, checkpoints={name: tmp_path / name for name in two})
    assert ranks(1)(quantized, saved)[0] == ([False, True], [False, True])
