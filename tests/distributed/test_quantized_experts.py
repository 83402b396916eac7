"""Law 7: what is exported of the routed experts is what the forward pass multiplies with, bit for bit, update after
update; nothing else is quantized; and gradients are those of the quantized model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import batch_of, config_of, load_folder, start
from ranks import Pools
from tiny import LAYOUTS, write_checkpoint

from megatron_mopd.config import Config
from megatron_mopd.errors import UserError
from megatron_mopd.quantization.formats import Rule, decode_mxfp4, encode_mxfp4, fake_quantize
from megatron_mopd.step_metrics import StepMetrics

LAYOUTS_OF_LAW = {name: LAYOUTS[name] for name in ("single", "TP2xEP2", "PP2", "TP2xEP2+ETP2", "PP2xVPP2")}
MXFP4 = {"experts": "mxfp4", "audit": True, "report_every_steps": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, moe_intermediate_size=64)
    return folder


def is_routed_expert(name: str) -> bool:
    return ".mlp.experts." in name


def update_and_export(config: Config, out: Path) -> list[dict[str, Any]]:
    """Before any update and after each of two: the folder's slices of this rank's experts against what the forward
    pass had."""
    from megatron_mopd.hf_folder import read_hf_config
    from megatron_mopd.mcore.parameters import geometry_of, parameters_of

    learner, batch, found = start(config), batch_of(), []
    hf_config = read_hf_config(config.student.checkpoint)
    for number in range(3):
        metrics = learner.update(batch) if number else None
        logprobs = learner.logprobs(batch)
        learner.export(out / str(number))
        served, geometry = load_folder(out / str(number)), geometry_of(learner.models, hf_config)
        of_forward = {w.data_ptr(): value for w, value in learner.experts._values.items()}
        same = []
        for p in parameters_of(learner.models, hf_config):
            if (value := of_forward.get(p.tensor.data_ptr())) is not None:
                full = [served[name] for name in p.hf_names]
                same.append(torch.equal(p.sharding.shard(full, geometry, p.group.rank(), p.group.size()), value))
        found.append({"same": same, "metrics": metrics, "logprobs": logprobs})
    return found


@pytest.mark.parametrize("layout", LAYOUTS_OF_LAW)
@pytest.mark.parametrize("rule", ["even", "rceil"])
def test_what_is_exported_is_what_is_trained(
    layout: str, rule: Rule, ranks: Pools, model: Path, tmp_path: Path
) -> None:
    size, megatron = LAYOUTS_OF_LAW[layout]
    config = config_of(model, {"lr": 1e-2, **megatron}, quantization={**MXFP4, "rule": rule})
    of_ranks = ranks(size)(update_and_export, config, tmp_path)
    experts = [name for name in load_folder(model) if is_routed_expert(name)]
    for number in range(3):
        assert sum(len(found[number]["same"]) for found in of_ranks) > 0
        assert all(all(found[number]["same"]) for found in of_ranks)
        served = load_folder(tmp_path / str(number))
        for name in experts:
            code = encode_mxfp4(served[name], rule)
            assert torch.equal(decode_mxfp4(code, torch.float32), served[name]), name
        off = [n for n in served if n not in experts and served[n].dim() == 2 and served[n].shape[1] % 32 == 0]
        assert not any(torch.equal(fake_quantize(served[name], rule), served[name]) for name in off)
    first, second = (load_folder(tmp_path / str(number)) for number in (0, 2))
    assert all(not torch.equal(first[name], second[name]) for name in experts)


def test_layouts_agree(ranks: Pools, model: Path, tmp_path: Path) -> None:
    want = None
    for layout, (size, megatron) in LAYOUTS_OF_LAW.items():
        config = config_of(model, {"lr": 1e-2, **megatron}, quantization=MXFP4)
        found = ranks(size)(update_and_export, config, tmp_path / layout)[0][-1]
        want = want or found
        np.testing.assert_allclose(found["logprobs"], want["logprobs"], atol=2e-2)  # a flipped code is a step
        assert np.median(np.abs(found["logprobs"] - want["logprobs"])) < 1e-5
        for name in ("error", "clipped_blocks", "saturated", "changed"):
            got, expected = (getattr(x["metrics"].quantization, name) for x in (found, want))
            assert got == pytest.approx(expected, abs=2e-3), name
        assert found["metrics"].quantization.error_of_layer.keys() == {0, 2, 3}


def measured(config: Config) -> tuple[Any, np.ndarray]:
    learner, batch = start(config), batch_of()
    return learner.update(batch).quantization, learner.logprobs(batch)


def test_late_weights_and_recomputation_change_nothing(ranks: Pools, model: Path) -> None:
    """Weights that are gathered only when the next forward pass needs them, and a forward pass that is run again."""
    plain, late, again = (
        ranks(2)(measured, config_of(model, {"lr": 1e-2, **options}, quantization=MXFP4))[0]
        for options in (
            {},
            {"overlap_grad_reduce": True, "overlap_param_gather": True},
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        )
    )
    assert late[0] == plain[0] == again[0]
    assert 0 < plain[0].changed < 1
    np.testing.assert_array_equal(late[1], plain[1])
    np.testing.assert_array_equal(again[1], plain[1])


def test_a_layer_that_is_not_asked_for_its_weight_is_noticed(ranks: Pools, model: Path) -> None:
    with pytest.raises(AssertionError, match="was multiplied without being quantized"):
        ranks(1)(update_with_one_layer_left, config_of(model, {}, quantization={"experts": "mxfp4"}))


def update_with_one_layer_left(config: Config) -> None:
    learner = start(config)
    layers: Any = learner.models[0].decoder.layers
    experts = layers[2].mlp.experts
    del experts.local_experts[3].linear_fc2._forward_impl
    learner.update(batch_of())


def on_grid(folder: Path, out: Path) -> None:
    import shutil

    from safetensors.torch import save_file

    shutil.copytree(folder, out)
    for file in out.glob("*.safetensors"):
        file.unlink()
    served = {name: fake_quantize(x) if is_routed_expert(name) else x for name, x in load_folder(folder).items()}
    save_file(served, out / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("layout", ["single", "TP2xEP2"])
def test_loss_and_gradients_are_those_of_the_quantized_model(
    layout: str, ranks: Pools, model: Path, tmp_path: Path
) -> None:
    """Which here is a checkpoint with the quantized values, trained without quantization."""
    size, megatron = LAYOUTS[layout]
    on_grid(model, tmp_path / "grid")
    megatron = {**megatron, "clip_grad": 0.0, "use_distributed_optimizer": False}
    quantization = {"experts": "mxfp4"}
    straight = ranks(size)(of_main_grad, config_of(model, megatron, quantization=quantization), tmp_path / "a")[0]
    plain = ranks(size)(of_main_grad, config_of(tmp_path / "grid", megatron), tmp_path / "b")[0]
    assert straight.loss == pytest.approx(plain.loss, abs=1e-7)
    got, want = load_folder(tmp_path / "a"), load_folder(tmp_path / "b")
    for name in want:
        torch.testing.assert_close(got[name], want[name], atol=1e-6, rtol=1e-5)
    assert any(want[name].abs().max() > 1e-4 for name in want if is_routed_expert(name))


def of_main_grad(config: Config, out: Path) -> StepMetrics:
    """One update, and the gradient that it used as a Hugging Face folder."""
    from megatron_mopd.mcore.weights import export_hf

    learner = start(config)
    metrics = learner.update(batch_of())
    with torch.no_grad():
        for parameter in (p for model in learner.models for p in model.parameters()):
            parameter.copy_(parameter.main_grad)  # pyright: ignore[reportAttributeAccessIssue]
    export_hf(learner.models, config.student.checkpoint, out)
    return metrics


def audit_of_changed(config: Config, out: Path, change: str) -> str:
    """What the audit says of a folder in which one thing was changed."""
    import torch.distributed as dist
    from safetensors.torch import save_file

    from megatron_mopd.mcore.audit import audit_export

    learner = start(config)
    learner.export(out)
    options = config.quantization
    if dist.get_rank() == 0:
        file = sorted(out.glob("*.safetensors"))[0]
        tensors = {name: x for name, x in load_folder(out).items() if name in keys_of(file)}
        name = next(n for n in sorted(tensors) if is_routed_expert(n))
        weight = load_folder(Path(config.student.checkpoint))[name]
        if change == "left":
            tensors[name] = weight
        elif change == "byte":
            tensors[name][0, :32] *= 2
        elif change == "attention":
            name = next(n for n in sorted(tensors) if "self_attn.q_proj" in n)
            tensors[name] = fake_quantize(tensors[name])
        elif change == "missing":
            del tensors[name]
        save_file(tensors, file, metadata={"format": "pt"})
    dist.barrier()
    if change == "missing":
        (out / "model.safetensors.index.json").unlink(missing_ok=True)
        dist.barrier()
    if change == "rule":
        options = options.model_copy(update={"rule": "rceil"})
    try:
        audit_export(learner.models, out, options)
    except UserError as error:
        return str(error)
    return ""


def keys_of(file: Path) -> set[str]:
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        return set(opened.keys())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("none", ""),
        ("left", "is not quantized, the trainer quantizes it"),
        ("byte", "differs from the trainer's in"),
        ("rule", "is quantized by the rule 'even', the trainer has 'rceil'"),
        ("attention", "is quantized by the rule 'even', the trainer has None"),
    ],
)
@pytest.mark.parametrize("layout", ["single", "TP2xEP2"])
def test_the_audit_finds_what_differs(
    layout: str, change: str, said: str, ranks: Pools, model: Path, tmp_path: Path
) -> None:
    size, megatron = LAYOUTS[layout]
    config = config_of(model, megatron, quantization={"experts": "mxfp4"})
    found = ranks(size)(audit_of_changed, config, tmp_path / "out", change)
    assert len(set(found)) == 1
    assert said in found[0]
    assert bool(found[0]) == bool(said)


def start_only(config: Config) -> str:
    try:
        start(config)
    except UserError as error:
        return str(error)
    return ""


def test_a_layout_that_cuts_a_block_is_refused(ranks: Pools, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", moe_intermediate_size=32)
    size, megatron = LAYOUTS["ETP2"]
    config = config_of(tmp_path / "model", megatron, quantization={"experts": "mxfp4"})
    assert "expert_tensor_parallel_size=2 cuts moe_intermediate_size 32" in ranks(size)(start_only, config)[0]


def logprobs_and_export(config: Config, out: Path) -> np.ndarray:
    learner = start(config)
    learner.export(out)
    return learner.logprobs(batch_of())


def of_transformers(folder: Path) -> np.ndarray:
    """Log-probs of the tokens of the batch from the weights in the folder, as the embedded engine computes them."""
    from transformers import Qwen3MoeForCausalLM

    model, batch = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), batch_of()
    found = np.zeros(len(batch.token_ids), np.float32)
    with torch.no_grad():
        for first, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
            ids = torch.from_numpy(batch.token_ids[first:end]).long()
            if len(ids) > 1:
                logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1)
                found[first + 1 : end] = logprobs.gather(1, ids[1:, None])[:, 0].numpy()
    return found


def test_rollout_and_trainer_agree_only_with_one_scheme(ranks: Pools, model: Path, tmp_path: Path) -> None:
    """Mean |trainer - rollout| log-prob: as small as without quantization, and more than ten times as large where the
    rollout alone is quantized."""
    off = ranks(1)(logprobs_and_export, config_of(model, {}), tmp_path / "off")[0]
    on = ranks(1)(logprobs_and_export, config_of(model, {}, quantization={"experts": "mxfp4"}), tmp_path / "on")[0]
    served_off, served_on = of_transformers(tmp_path / "off"), of_transformers(tmp_path / "on")
    mismatch = {
        "neither": np.abs(off - served_off).mean(),
        "both": np.abs(on - served_on).mean(),
        "rollout alone": np.abs(off - served_on).mean(),
    }
    assert abs(mismatch["both"] - mismatch["neither"]) < 1e-4, mismatch
    assert mismatch["rollout alone"] > 10 * max(mismatch["both"], 1e-4), mismatch
