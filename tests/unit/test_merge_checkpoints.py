"""Laws of merged checkpoints, on tiny models as transformers writes them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import write_checkpoint

from megatron_mopd.errors import UserError
from megatron_mopd.hf_folder import check_weight_files
from tools import merge_checkpoints
from tools.merge_checkpoints import main


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folders = [tmp_path_factory.mktemp("checkpoints") / name for name in ("base", "one", "two", "three")]
    for seed, folder in enumerate(folders):
        write_checkpoint(folder, seed, num_hidden_layers=2, num_experts=2)
    return folders


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def rewrite(source: Path, target: Path, **changes: torch.Tensor) -> Path:
    """A copy of the checkpoint in two files, with changed tensors."""
    target.mkdir()
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        shutil.copyfile(source / name, target / name)
    tensors = {**weights(source), **changes}
    files = {name: f"part{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: t for name, t in tensors.items() if files[name] == file}, target / file)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return target


def test_the_average_is_that_of_float64(checkpoints: list[Path], tmp_path: Path) -> None:
    main(["average", "--out", str(tmp_path / "run/student"), *map(str, checkpoints[1:])])
    parts = [weights(folder) for folder in checkpoints[1:]]
    assert_equal(
        weights(tmp_path / "run/student"),
        {name: ((parts[0][name].double() + parts[1][name] + parts[2][name]) / 3).float() for name in parts[0]},
    )
    check_weight_files(tmp_path / "run/student", "student")
    assert (tmp_path / "run/student/config.json").read_bytes() == (checkpoints[1] / "config.json").read_bytes()


def test_task_arithmetic_adds_scaled_differences_to_the_base(checkpoints: list[Path], tmp_path: Path) -> None:
    words = ["task-arithmetic", "--scale", "0.3", "--base", str(checkpoints[0]), "--out", str(tmp_path / "out")]
    main([*words, *map(str, checkpoints[1:3])])
    base, one, two = (weights(folder) for folder in checkpoints[:3])
    wanted = {n: (b.double() + 0.3 * ((one[n].double() - b) + (two[n].double() - b))).float() for n, b in base.items()}
    assert_equal(weights(tmp_path / "out"), wanted)


def test_copies_of_one_checkpoint_merge_to_its_bits(checkpoints: list[Path], tmp_path: Path) -> None:
    """Also in bfloat16 and over several files; a teacher that is the base adds nothing at any scale."""
    half = {name: tensor.bfloat16() for name, tensor in weights(checkpoints[0]).items()}
    base = rewrite(checkpoints[0], tmp_path / "half", **half)
    main(["average", "--out", str(tmp_path / "a"), *[str(base)] * 3])
    main(["task-arithmetic", "--scale", "0.7", "--base", str(base), "--out", str(tmp_path / "b"), *[str(base)] * 3])
    for out in (tmp_path / "a", tmp_path / "b"):
        assert_equal(weights(out), half)
        assert sorted(f.name for f in out.glob("*.safetensors")) == ["part0.safetensors", "part1.safetensors"]


def test_transformers_loads_what_was_merged(checkpoints: list[Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    main(["average", "--out", str(tmp_path / "out"), *map(str, checkpoints[1:3])])
    logits = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(torch.arange(8)[None]).logits
    assert torch.isfinite(logits).all()


def test_a_merge_that_is_killed_leaves_nothing_and_one_that_is_there_is_kept(
    checkpoints: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["average", "--out", str(tmp_path / "out"), *map(str, checkpoints[1:])]
    whole = merge_checkpoints._write_file

    def killed(*arguments: object) -> None:
        whole(*arguments)  # pyright: ignore[reportArgumentType]
        raise KeyboardInterrupt

    monkeypatch.setattr(merge_checkpoints, "_write_file", killed)
    with pytest.raises(KeyboardInterrupt):
        main(words)
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    main(words)
    before = (tmp_path / "out").stat().st_mtime_ns
    main(words)
    assert (tmp_path / "out").stat().st_mtime_ns == before
    with pytest.raises(UserError, match="out is there, and was not made by these words"):
        main(words[:-1])
    assert [f.name for f in tmp_path.iterdir()] == ["out"]


def test_checkpoints_that_do_not_fit_are_refused_by_name(checkpoints: list[Path], tmp_path: Path) -> None:
    name = "model.norm.weight"
    other_shape = rewrite(checkpoints[1], tmp_path / "shape", **{name: torch.zeros(3)})
    other_name = rewrite(checkpoints[1], tmp_path / "name", extra=torch.zeros(3))
    quantized = rewrite(checkpoints[1], tmp_path / "type", **{name: torch.zeros(64, dtype=torch.uint8)})
    other_tokens = rewrite(checkpoints[1], tmp_path / "tokens")
    (other_tokens / "tokenizer.json").write_text(
        (other_tokens / "tokenizer.json").read_text().replace('"t7"', '"other"')
    )
    for folder, line in (
        (other_shape, "model.norm.weight is [3] and [64]"),
        (other_name, "has no extra"),
        (quantized, "model.norm.weight is U8; merge checkpoints that are not quantized"),
        (other_tokens, "another tokenizer: id 7 is 'other'"),
    ):
        with pytest.raises(UserError, match=re.escape(line)):
            main(["average", "--out", str(tmp_path / "out"), str(checkpoints[1]), str(folder)])
    assert not (tmp_path / "out").exists()
