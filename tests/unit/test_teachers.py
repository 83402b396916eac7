"""ROUTE and SCORE: the router fails closed (law 9), lanes lose nothing and do not depend on timing (law 10)."""

import json
from pathlib import Path

import pytest

from megatron_mopd.config import Teacher
from megatron_mopd.errors import UserError
from megatron_mopd.hf_folder import check_weight_files, read_hf_config, read_token_map
from megatron_mopd.teachers.identity import check_same_language
from megatron_mopd.teachers.router import Router
from megatron_mopd.types import Cell

CELLS = (Cell("law", "low"), Cell("law", "high"))


def teacher(effort, name=None, domain="law"):
    return Teacher(name=name or f"{domain}-{effort}", domain=domain, effort=effort, checkpoint=Path("x"))


def test_each_cell_has_its_teacher():
    router = Router([teacher("high"), teacher("low")], CELLS)
    assert router.route(Cell("law", "low")) == "law-low"
    assert "law/high" in router.coverage()


def test_router_rejects_a_missing_teacher():
    with pytest.raises(UserError, match="no teacher for law/high"):
        Router([teacher("low")], CELLS)


def test_router_rejects_two_teachers_of_one_cell_and_two_of_one_name():
    with pytest.raises(UserError, match="two teachers for law/low: law-low and other"):
        Router([teacher("low"), teacher("low", "other"), teacher("high")], CELLS)
    with pytest.raises(UserError, match="two teachers are named same"):
        Router([teacher("low", "same"), teacher("high", "same")], CELLS)


def test_router_rejects_an_unknown_cell():
    with pytest.raises(UserError, match="no teacher for med/low"):
        Router([teacher("low"), teacher("high")], CELLS).route(Cell("med", "low"))


def test_a_teacher_that_no_prompt_reaches_is_named_in_the_coverage():
    router = Router([teacher("low"), teacher("high"), teacher("max")], CELLS)
    assert "law-max is never used" in router.coverage()


def checkpoint(folder, tokens=("a", "b", "c"), size=None):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["X"], "vocab_size": size or len(tokens)}))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_a_teacher_of_another_tokenizer_is_refused(tmp_path):
    student = checkpoint(tmp_path / "student")
    check_same_language(student, checkpoint(tmp_path / "same"), "teachers.models.0")
    with pytest.raises(UserError, match=r"another tokenizer: id 1 is 'x', the student's is 'b'"):
        check_same_language(student, checkpoint(tmp_path / "other", ("a", "x", "c")), "teachers.models.0")


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"student.checkpoint: .*nowhere is not a folder"):
        read_hf_config(tmp_path / "nowhere", "student.checkpoint")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"config.json does not exist"):
        read_hf_config(tmp_path / "empty", "student.checkpoint")
    folder = checkpoint(tmp_path / "torn")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"has no model.safetensors"):
        read_hf_config(folder, "student.checkpoint")
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        read_hf_config(folder, "student.checkpoint")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda whole: whole[:-1], r"has 83 bytes, its header says 84; copy the checkpoint again"),
        (lambda whole: whole + b"x", "has 85 bytes, its header says 84"),
        (lambda whole: whole[:5], "is not a safetensors file"),
        (lambda whole: b"", "is not a safetensors file"),
        (lambda whole: b"PK" + whole, "is not a safetensors file"),
        (lambda whole: b"\xff" * 8 + whole[8:], "is not a safetensors file"),
    ],
)
def test_weights_that_were_cut_or_are_something_else_are_refused(tmp_path, damage, reason):
    folder = checkpoint(tmp_path / "model")
    file = folder / "model.safetensors"
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode().ljust(68)
    whole = len(header).to_bytes(8, "little") + header + bytes(8)
    file.write_bytes(whole)
    check_weight_files(folder, "student.checkpoint")
    file.write_bytes(damage(whole))
    with pytest.raises(UserError, match=reason):
        check_weight_files(folder, "student.checkpoint")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("config.json", {"architectures": ["X"]}, "vocab_size=None, which must be a positive integer"),
        ("config.json", {"architectures": ["X"], "vocab_size": "3"}, "vocab_size='3'"),
        ("config.json", ["architectures"], "names no architectures"),
        ("model.safetensors.index.json", {"weights": {}}, "has no weight_map"),
        ("model.safetensors.index.json", {"weight_map": {"w": "gone.safetensors"}}, "has no gone.safetensors"),
        ("tokenizer.json", {}, "has no vocabulary of tokens and ids"),
        ("tokenizer.json", {"model": {"vocab": [1, 2]}}, "has no vocabulary of tokens and ids"),
        ("tokenizer.json", None, "has no vocabulary of tokens and ids"),
    ],
)
def test_json_files_of_another_shape_are_refused_by_name(tmp_path, name, content, reason):
    folder = checkpoint(tmp_path / "model")
    (folder / name).write_text(json.dumps(content))
    with pytest.raises(UserError, match=reason):
        read_token_map(folder, "k") if name == "tokenizer.json" else read_hf_config(folder, "k")
