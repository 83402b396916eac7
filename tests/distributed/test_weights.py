"""Law 8: Hugging Face -> Megatron -> Hugging Face returns the same tensors bit for bit, in every layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Pools
from safetensors.torch import load_file, save_file
from tiny import LAYOUTS, VOCAB_SIZE, write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_moe")
    write_checkpoint(folder)
    return folder


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def build(megatron: dict[str, Any], folder: Path):
    from megatron_mopd.hf_folder import read_hf_config
    from megatron_mopd.mcore.layout import Layout
    from megatron_mopd.mcore.model import build_model
    from megatron_mopd.mcore.parallel import initialize_parallel

    initialize_parallel(Layout.from_table(megatron), seed=1)
    return build_model(megatron, read_hf_config(folder))


def round_trip(megatron: dict[str, Any], source: Path, out: Path, shard_bytes: int) -> None:
    from megatron_mopd.mcore.weights import export_hf, load_hf

    models = build(megatron, source)
    load_hf(models, source)
    export_hf(models, source, out, shard_bytes=shard_bytes)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hf_to_megatron_to_hf_is_bit_exact(layout: str, ranks: Pools, checkpoint: Path, tmp_path: Path):
    size, megatron = LAYOUTS[layout]
    ranks(size)(round_trip, megatron, checkpoint, tmp_path / "out", 100_000)
    want, got = load_folder(checkpoint), load_folder(tmp_path / "out")
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(got[name], want[name]), name
    assert want["lm_head.weight"].shape[0] == VOCAB_SIZE

    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == want.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in want.values())
    assert len(set(index["weight_map"].values())) > 2  # shards stay bounded
    for file in ("config.json", "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "out" / file).read_bytes() == (checkpoint / file).read_bytes()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def export_twice(source: Path, out: Path) -> None:
    from megatron_mopd.mcore.weights import export_hf, load_hf

    models = build({}, source)
    load_hf(models, source)
    export_hf(models, source, out)
    dict(models[0].named_parameters())["decoder.final_layernorm.weight"].data.fill_(2.0)
    export_hf(models, source, out)


def test_export_replaces_an_older_folder(ranks: Pools, checkpoint: Path, tmp_path: Path):
    ranks(1)(export_twice, checkpoint, tmp_path / "out")
    assert torch.equal(load_folder(tmp_path / "out")["model.norm.weight"], torch.full((64,), 2.0))
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def error_of_load(megatron: dict[str, Any], source: Path, folder: Path) -> tuple[str, bool]:
    """What load_hf says, and whether the weights are as they were."""
    from megatron_mopd.errors import UserError
    from megatron_mopd.mcore.weights import load_hf

    models = build(megatron, source)
    before = [p.clone() for m in models for p in m.parameters()]
    try:
        load_hf(models, folder)
    except UserError as error:
        after = [p for m in models for p in m.parameters()]
        return str(error), all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return "", False


def damaged(checkpoint: Path, folder: Path, change) -> Path:
    shutil.copytree(checkpoint, folder)
    tensors = load_folder(folder)
    change(tensors)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors")
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    return folder


@pytest.mark.parametrize("layout", ["single", "EP2"])
def test_load_lists_every_mismatch_before_it_writes(layout: str, ranks: Pools, checkpoint: Path, tmp_path: Path):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.0.mlp.experts.7.up_proj.weight"]
        tensors["model.layers.2.self_attn.k_proj.weight"] = torch.zeros(32, 64)
        tensors["model.layers.9.input_layernorm.weight"] = torch.zeros(64)

    size, megatron = LAYOUTS[layout]
    folder = damaged(checkpoint, tmp_path / "damaged", change)
    for message, untouched in ranks(size)(error_of_load, megatron, checkpoint, folder):
        assert "model.layers.0.mlp.experts.7.up_proj.weight is missing" in message
        assert "model.layers.2.self_attn.k_proj.weight is [32, 64], the model needs [64, 64]" in message
        assert "model.layers.9.input_layernorm.weight is not a tensor of this model" in message
        assert untouched


def test_load_rejects_nan(ranks: Pools, checkpoint: Path, tmp_path: Path):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"][3] = float("nan")

    folder = damaged(checkpoint, tmp_path / "damaged", change)
    ((message, _),) = ranks(1)(error_of_load, {}, checkpoint, folder)
    assert "holds NaN in model.norm.weight" in message


def test_load_rejects_a_folder_that_is_no_checkpoint(ranks: Pools, checkpoint: Path, tmp_path: Path):
    incomplete = tmp_path / "incomplete"
    shutil.copytree(checkpoint, incomplete)
    (incomplete / "model.safetensors.index.json").write_text(
        '{"weight_map": {"model.norm.weight": "gone.safetensors"}}'
    )
    torn = tmp_path / "torn"
    shutil.copytree(checkpoint, torn)
    (torn / "model.safetensors").write_bytes(b"not this")
    for folder, says in [
        (tmp_path / "nowhere", "is not a folder"),
        (tmp_path, "config.json does not exist"),
        (incomplete, "has no gone.safetensors"),
        (torn, "is not a safetensors file"),
    ]:
        ((message, _),) = ranks(1)(error_of_load, {}, checkpoint, folder)
        assert says in message


def refusal(megatron: dict[str, Any], source: Path) -> str:
    from megatron_mopd.errors import UserError
    from megatron_mopd.mcore.weights import load_hf

    try:
        load_hf(build(megatron, source), source)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("megatron", "says"),
    [
        ({"moe_router_topk": 4}, r"megatron.moe_router_topk=4 contradicts the checkpoint's config.json (2)"),
        ({"moe_shared_expert_intermediate_size": 32}, "megatron.moe_shared_expert_intermediate_size=32 contradicts"),
        ({"moe_router_score_function": "sigmoid"}, "megatron.moe_router_score_function='sigmoid' contradicts"),
        ({"add_qkv_bias": True}, "has no tensor for Megatron's decoder.layers.0.self_attention.linear_qkv.bias"),
    ],
)
def test_a_model_that_the_checkpoint_is_not_is_refused(megatron, says: str, ranks: Pools, checkpoint: Path):
    (message,) = ranks(1)(refusal, megatron, checkpoint)
    assert says in message


def global_names(source: Path, names: list[str]) -> list[str]:
    from megatron_mopd.mcore.parameters import global_name

    (model,) = build({"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2}, source)
    return [global_name(model, name) for name in names]


def test_transformer_engine_names_are_those_of_the_local_layers(ranks: Pools, checkpoint: Path):
    """The last of four ranks holds layers 2 and 3, and experts 4 to 7."""
    names = {
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": "decoder.layers.2.input_layernorm.weight",
        "decoder.layers.1.mlp.linear_fc1.layer_norm_weight": "decoder.layers.3.pre_mlp_layernorm.weight",
        "decoder.layers.0.mlp.experts.linear_fc2.weight3": (
            "decoder.layers.2.mlp.experts.local_experts.7.linear_fc2.weight"
        ),
        "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight": (
            "decoder.layers.2.mlp.experts.local_experts.5.linear_fc1.weight"
        ),
    }
    assert ranks(4)(global_names, checkpoint, list(names))[-1] == list(names.values())
