"""MXFP4 folders: transformers reads them, values and bytes survive, and what is wrong is refused in one line."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import write_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from checkpoints_conversion import export_mxfp4, import_mxfp4
from megatron_mopd.cli import guarded
from megatron_mopd.errors import UserError
from megatron_mopd.quantization import packed_layouts
from megatron_mopd.quantization.formats import Rule, fake_quantize
from megatron_mopd.quantization.packed_folder import BLOCKS_KEY, RULES, SHARD_BYTES, export_packed, import_packed
from megatron_mopd.quantization.packed_layouts import EXPERT, LAYOUTS, RULE_KEY, Layout

SMALL_SHARDS = 40_000


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "model"
    write_checkpoint(folder, num_hidden_layers=2, num_experts=4)
    return folder


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def metadata(file: Path) -> dict[str, str]:
    with safe_open(file, framework="pt") as opened:
        return opened.metadata()


def assert_same_bytes(found: Path, wanted: Path) -> None:
    ours, theirs = tensors(found), tensors(wanted)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rule", RULES)
def test_importing_gives_the_fake_quantized_experts(source: Path, tmp_path: Path, layout: Layout, rule: Rule) -> None:
    written = export_packed(source, tmp_path / "packed", layout, rule, SMALL_SHARDS)
    import_packed(tmp_path / "packed", tmp_path / "dense", SMALL_SHARDS)
    found, dense = tensors(tmp_path / "dense"), tensors(source)
    assert len(list((tmp_path / "packed").glob("*.safetensors"))) > 1
    assert found.keys() == dense.keys()
    for name, tensor in dense.items():
        want = fake_quantize(tensor, rule) if EXPERT.fullmatch(name) else tensor
        assert torch.equal(found[name].view(torch.int32), want.view(torch.int32)), name
    assert written.expert_weights == sum(EXPERT.fullmatch(name) is not None for name in dense) == 12
    config = json.loads((tmp_path / "dense/config.json").read_text())
    assert config == json.loads((source / "config.json").read_text())
    assert (tmp_path / "dense/tokenizer.json").is_file()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_exporting_an_import_gives_the_same_bytes(source: Path, tmp_path: Path, layout: Layout) -> None:
    export_packed(source, tmp_path / "once", layout, "even", SMALL_SHARDS)
    import_packed(tmp_path / "once", tmp_path / "dense")
    export_packed(tmp_path / "dense", tmp_path / "again", layout, "even", SMALL_SHARDS)
    assert_same_bytes(tmp_path / "again", tmp_path / "once")
    for file in (tmp_path / "once").glob("*.safetensors"):
        assert metadata(tmp_path / "again" / file.name) == metadata(file)
    for name in ("config.json", "model.safetensors.index.json"):
        assert json.loads((tmp_path / "again" / name).read_text()) == json.loads((tmp_path / "once" / name).read_text())


@pytest.mark.filterwarnings("ignore:You passed .quantization_config.")  # `dequantize` is taken from what is passed
def test_transformers_loads_the_export_and_gives_the_logits_of_the_values(source: Path, tmp_path: Path) -> None:
    export_packed(source, tmp_path / "packed", shard_bytes=SMALL_SHARDS)
    import_packed(tmp_path / "packed", tmp_path / "dense")
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        packed = AutoModelForCausalLM.from_pretrained(
            tmp_path / "packed", dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
        )
        packed.float()  # transformers leaves the unpacked experts in bfloat16, which holds their values
        dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
        before = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        assert torch.equal(packed(tokens).logits, dense(tokens).logits)
        assert not torch.equal(packed(tokens).logits, before(tokens).logits)


def test_transformers_decodes_the_gpt_oss_layout(source: Path, tmp_path: Path) -> None:
    export_packed(source, tmp_path / "packed", "gpt-oss")
    packed, dense = tensors(tmp_path / "packed"), tensors(source)
    experts = "model.layers.0.mlp.experts"
    for fused, parts in (("gate_up", ("gate", "up")), ("down", ("down",))):
        name = f"{experts}.{fused}_proj"
        found = convert_moe_packed_tensors(packed[f"{name}_blocks"], packed[f"{name}_scales"], dtype=torch.float32)
        for expert in range(4):
            for i, part in enumerate(parts):
                want = fake_quantize(dense[f"{experts}.{expert}.{part}_proj.weight"])
                assert torch.equal(found[expert, :, i :: len(parts)].t(), want)


def test_config_ignores_every_other_matrix_and_no_expert(source: Path, tmp_path: Path) -> None:
    export_packed(source, tmp_path / "packed")
    config = json.loads((tmp_path / "packed/config.json").read_text())["quantization_config"]
    assert config["format"] == config["config_groups"]["group_0"]["format"] == "mxfp4-pack-quantized"
    modules = {name.rpartition(".")[0]: t for name, t in tensors(source).items() if t.dim() == 2}
    for name in modules:
        ignored = any(re.match(pattern.removeprefix("re:"), name) for pattern in config["ignore"])
        assert ignored != (EXPERT.fullmatch(f"{name}.weight") is not None), name
    for fused in ("model.layers.0.self_attn.qkv_proj", "model.layers.1.mlp.gate_up_proj"):
        assert any(re.match(pattern.removeprefix("re:"), fused) for pattern in config["ignore"])


def test_a_matrix_of_no_known_role_is_ignored_by_name() -> None:
    config = packed_layouts.quantization_config("compressed-tensors", "even", ["model.novel.weight"])
    assert config["ignore"] == ["model.novel"]
    config = packed_layouts.quantization_config("gpt-oss", "even", ["model.layers.3.self_attn.q_proj.weight"])
    assert config["modules_to_not_convert"] == ["model.layers.*.self_attn"]


def test_the_commands(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export_mxfp4.main([str(source), str(tmp_path / "packed"), "--layout", "gpt-oss", "--rule", "rceil"])
    import_mxfp4.main([str(tmp_path / "packed"), str(tmp_path / "dense")])
    assert "12 expert weights" in capsys.readouterr().out
    assert guarded(lambda: export_mxfp4.main([str(source), str(tmp_path / "packed")])) == 2
    assert "is there already; remove it" in capsys.readouterr().err


def refused(source: Path, out: Path, match: str, layout: str = "compressed-tensors", rule: str = "even") -> None:
    with pytest.raises(UserError, match=match):
        export_packed(source, out, layout, rule)
    assert not out.exists()


def test_export_refuses_what_it_does_not_know(source: Path, tmp_path: Path) -> None:
    refused(source, tmp_path / "out", "unknown layout 'gguf'; choose from compressed-tensors, gpt-oss", layout="gguf")
    refused(source, tmp_path / "out", "unknown rule 'ceil'; choose from floor, even, rceil", rule="ceil")
    export_packed(source, tmp_path / "packed")
    refused(tmp_path / "packed", tmp_path / "out", r"is quantized already \(compressed-tensors\); import it first")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t[:, :16], r"is \[32, 16\]; MXFP4 needs columns in multiples of 32"),
        (lambda t: t.half(), "is F16; MXFP4 is made of BF16 or F32"),
        (lambda t: t * torch.nan, "holds NaN or infinity"),
        (lambda t: t * torch.inf, "holds NaN or infinity"),
    ],
)
def test_export_refuses_weights(source: Path, tmp_path: Path, change: Callable[[Tensor], Tensor], match: str) -> None:
    folder = changed(source, tmp_path / "changed", "model.layers.0.mlp.experts.3.up_proj.weight", change)
    refused(folder, tmp_path / "out", match)


def test_export_refuses_incomplete_experts(source: Path, tmp_path: Path) -> None:
    folder = changed(source, tmp_path / "changed", "model.layers.0.mlp.experts.3.up_proj.weight", None)
    refused(folder, tmp_path / "out", r"experts.3.up_proj.weight has no counterpart", layout="gpt-oss")
    for name in tensors(source):
        if EXPERT.fullmatch(name) and name in tensors(folder):
            changed(folder, folder, name, None)
    refused(folder, tmp_path / "out", "has no experts")


def changed(source: Path, folder: Path, name: str, change: Callable[[Tensor], Tensor] | None) -> Path:
    """A copy of a folder with another tensor, or without it, in the same files; their metadata stay."""
    if folder != source:
        shutil.copytree(source, folder)
    for file in folder.glob("*.safetensors"):
        held, said = load_file(file), metadata(file)
        if name in held:
            tensor = held.pop(name)
            save_file(held if change is None else {**held, name: change(tensor).contiguous()}, file, said)
    return folder


def swap(packed: Tensor) -> Tensor:
    return packed << 4 | packed >> 4


@pytest.mark.parametrize(
    ("layout", "name", "change", "match"),
    [
        (
            "compressed-tensors",
            "0.down_proj.weight_packed",
            swap,
            "weight_packed has its nibbles in the wrong order",
        ),
        ("gpt-oss", "down_proj_blocks", swap, "down_proj_blocks has its nibbles in the wrong order"),
        ("compressed-tensors", "0.down_proj.weight_scale", lambda t: t + 1, "does not decode to what was exported"),
        ("compressed-tensors", "0.down_proj.weight_scale", lambda t: t * 0 - 1, "does not decode|holds NaN"),
        ("compressed-tensors", "3.up_proj.weight_scale", lambda t: t * 0 - 1, "3.up_proj.weight_scale holds NaN"),
        ("compressed-tensors", "3.up_proj.weight_scale", None, "weight_packed has no .*weight_scale; copy"),
        ("compressed-tensors", "3.up_proj.weight_scale", lambda t: t[:3], "are not MXFP4"),
        ("gpt-oss", "down_proj_blocks", lambda t: t[..., :8], "are not MXFP4"),
        ("gpt-oss", "down_proj_blocks", lambda t: t.int(), "I32 .* are not MXFP4"),
    ],
)
def test_import_refuses_damage(
    source: Path,
    tmp_path: Path,
    layout: Layout,
    name: str,
    change: Callable[[Tensor], Tensor] | None,
    match: str,
) -> None:
    export_packed(source, tmp_path / "packed", layout)
    changed(tmp_path / "packed", tmp_path / "packed", f"model.layers.0.mlp.experts.{name}", change)
    with pytest.raises(UserError, match=match):
        import_packed(tmp_path / "packed", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_import_refuses_mixed_rules(source: Path, tmp_path: Path) -> None:
    export_packed(source, tmp_path / "packed", rule="even", shard_bytes=SMALL_SHARDS)
    export_packed(source, tmp_path / "other", rule="floor", shard_bytes=SMALL_SHARDS)
    first = tmp_path / "packed/model-00000-00000.safetensors"
    shutil.copyfile(tmp_path / "other" / first.name, first)
    with pytest.raises(UserError, match="mixes the rules even, floor; export the whole checkpoint again"):
        import_packed(tmp_path / "packed", tmp_path / "out")
    save_file(
        load_file(tmp_path / "packed/model-00000-00000.safetensors"), tmp_path / "packed/model-00000-00000.safetensors"
    )
    with pytest.raises(UserError, match=r"files of another origin than its config.json"):
        import_packed(tmp_path / "packed", tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("model.layers.0.mlp.experts.3.up_proj.weight", "holds .*3.up_proj.weight twice, packed and plain"),
        ("model.layers.0.mlp.experts.3.up_proj.weight_packed", "both hold .*3.up_proj.weight_packed; remove one"),
    ],
)
def test_import_refuses_a_weight_that_is_there_twice(source: Path, tmp_path: Path, name: str, match: str) -> None:
    export_packed(source, tmp_path / "packed")
    index = tmp_path / "packed/model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["one more"] = "more.safetensors"
    index.write_text(json.dumps(content))
    save_file({name: torch.zeros(96, 32)}, tmp_path / "packed/more.safetensors")
    with pytest.raises(UserError, match=match):
        import_packed(tmp_path / "packed", tmp_path / "out")


def test_a_folder_that_cannot_be_written_is_one_line_and_leaves_nothing(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot be written: .*Not a directory"):
        export_packed(source, tmp_path / "file" / "out")
    damaged = changed(
        source, tmp_path / "changed", "model.layers.0.mlp.experts.3.up_proj.weight", lambda t: t * torch.nan
    )
    with pytest.raises(UserError, match="holds NaN"):
        export_packed(damaged, tmp_path / "new" / "out", shard_bytes=SMALL_SHARDS)
    assert list((tmp_path / "new").iterdir()) == []


def test_import_takes_what_others_have_packed(source: Path, tmp_path: Path) -> None:
    """Without any record."""
    export_packed(source, tmp_path / "packed")
    import_packed(tmp_path / "packed", tmp_path / "ours")
    for file in (tmp_path / "packed").glob("*.safetensors"):
        assert BLOCKS_KEY in metadata(file)
        save_file(load_file(file), file)
    config = json.loads((tmp_path / "packed/config.json").read_text())
    del config["quantization_config"][RULE_KEY]
    (tmp_path / "packed/config.json").write_text(json.dumps(config))
    import_packed(tmp_path / "packed", tmp_path / "theirs", SHARD_BYTES)
    assert_same_bytes(tmp_path / "theirs", tmp_path / "ours")


def test_import_refuses_what_is_not_packed(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no MXFP4 tensors"):
        import_packed(source, tmp_path / "out")
    export_packed(source, tmp_path / "packed")
    config = json.loads((tmp_path / "packed/config.json").read_text())
    (tmp_path / "packed/config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    with pytest.raises(UserError, match="has dtype float16; set it to bfloat16 or float32"):
        import_packed(tmp_path / "packed", tmp_path / "out")
