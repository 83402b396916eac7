"""Who a teacher is: its fingerprint sees every change that matters and no other; its contract with the student."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict

import numpy as np
import pytest
from safetensors.numpy import save_file

from megatron_mopd.config import Config
from megatron_mopd.errors import UserError
from megatron_mopd.mcore.layout import Layout
from megatron_mopd.preflight import check_teachers
from megatron_mopd.resume import facts, write_facts
from megatron_mopd.teachers.identity import check_same_language, fingerprint

TOKENS = ("a", "b", "c")
CONFIG = {
    "architectures": ["X"],
    "vocab_size": 3,
    "rope_parameters": {"rope_theta": 100.0},
    "transformers_version": "5",
}
TEMPLATE = "{% for m in messages %}\n{{ m.content }}\n{% endfor %}"


def tensors():
    rng = np.random.default_rng(0)
    shapes = {"embed": (3, 8), "norm": (8,), "scalar": (), "expert": (128, 128), "half": (200, 100)}
    values = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    return {**values, "half": values["half"].astype(np.float16), "empty": np.zeros((0, 8), np.float32)}


def write_weights(folder, weights, num_files=1, order=1):
    for old in folder.glob("model*"):
        old.unlink()
    names = sorted(weights)[::order]
    shards = {f"model-{i}.safetensors": names[i::num_files] for i in range(num_files)}
    for file, of_file in shards.items():
        save_file({name: weights[name] for name in of_file}, folder / file)
    weight_map = {name: file for file, of_file in shards.items() for name in of_file}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def write(folder, tokens=TOKENS, template=TEMPLATE, **config):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    (folder / "chat_template.jinja").write_text(template)
    write_weights(folder, tensors())
    return folder


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "model")


def optimizer_step(values, share=1.0):
    """Values of a tensor after a step that moves a share of them by one unit in the last place."""
    moved = np.random.default_rng(1).random(values.shape) < share
    return np.where(moved, np.nextafter(values, np.asarray(np.inf, values.dtype)), values)


@pytest.mark.parametrize("name", sorted(tensors().keys() - {"empty"}))
def test_a_step_of_any_one_tensor_gives_other_weights(folder, name):
    before, weights = fingerprint(folder), tensors()
    write_weights(folder, weights | {name: optimizer_step(weights[name])})
    after = fingerprint(folder)
    assert str(after) != str(before)
    assert {field for field in asdict(after) if asdict(after)[field] != asdict(before)[field]} == {"weights"}


def test_a_step_that_rounds_most_of_a_large_tensor_back_is_seen(folder):
    before, weights = fingerprint(folder), tensors()
    for name in ("expert", "half"):
        write_weights(folder, weights | {name: optimizer_step(weights[name], share=0.01)})
        assert fingerprint(folder).weights != before.weights


@pytest.mark.parametrize(
    "change",
    [
        lambda w: {**w, "more": w["norm"]},
        lambda w: {k: v for k, v in w.items() if k != "norm"},
        lambda w: {("renamed" if k == "norm" else k): v for k, v in w.items()},
        lambda w: {**w, "expert": w["expert"].reshape(64, 256)},
        lambda w: {**w, "expert": w["expert"].view(np.int32)},
        lambda w: {**w, "norm": w["expert"], "expert": w["norm"]},
    ],
    ids=["added", "removed", "renamed", "shape", "dtype", "swapped"],
)
def test_other_tensors_give_other_weights(folder, change):
    before = fingerprint(folder).weights
    write_weights(folder, change(tensors()))
    assert fingerprint(folder).weights != before


@pytest.mark.parametrize(("num_files", "order"), [(2, 1), (3, -1), (6, 1)])
def test_how_tensors_lie_in_files_changes_nothing(folder, num_files, order):
    before = fingerprint(folder)
    write_weights(folder, tensors(), num_files, order)
    assert fingerprint(folder) == before
    write_weights(folder, tensors())
    (folder / "model-0.safetensors").rename(folder / "model.safetensors")
    (folder / "model.safetensors.index.json").unlink()
    assert fingerprint(folder) == before


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"tokens": ("a", "x", "c")}, "tokenizer"),
        ({"tokens": ("b", "a", "c")}, "tokenizer"),
        ({"template": TEMPLATE.replace("content", "role")}, "template"),
        ({"rope_parameters": {"rope_theta": 101.0}}, "architecture"),
    ],
)
def test_each_part_shows_its_own_change(folder, tmp_path, changed, field):
    before, after = asdict(fingerprint(folder)), asdict(fingerprint(write(tmp_path / "other", **changed)))
    assert {name for name in before if before[name] != after[name]} == {field}


def test_where_a_template_is_kept_and_who_wrote_the_config_change_nothing(folder, tmp_path):
    before = fingerprint(folder)
    other = write(tmp_path / "other", transformers_version="6", dtype="bfloat16")
    (other / "chat_template.jinja").unlink()
    for template in (TEMPLATE, [{"name": "tool_use", "template": "x"}, {"name": "default", "template": TEMPLATE}]):
        (other / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        assert fingerprint(other) == before


def test_weights_of_a_megatron_checkpoint_are_its_files(folder, tmp_path):
    saved = tmp_path / "step_1"
    saved.mkdir()
    (saved / "__0_0.distcp").write_bytes(bytes(100_000))
    (saved / "metadata.json").write_text("{}")
    before = fingerprint(folder, saved)
    assert before.weights != fingerprint(folder).weights
    shutil.copytree(saved, tmp_path / "copy")
    assert fingerprint(folder, tmp_path / "copy") == before
    (saved / "__0_0.distcp").write_bytes(b"\1" * 100_000)
    assert fingerprint(folder, saved).weights != before.weights
    with pytest.raises(UserError, match="has no files; it must be a Megatron distributed checkpoint"):
        fingerprint(folder, tmp_path / "nowhere")


def test_a_teacher_may_have_other_padding_rows_and_this_is_said(folder, tmp_path):
    assert check_same_language(folder, write(tmp_path / "same"), "k") == ""
    wide = write(tmp_path / "wide", vocab_size=8)
    assert check_same_language(folder, wide, "k") == (
        "k: 8 vocabulary rows, the student's 3; those beyond 3 tokens are padding"
    )
    assert "3 vocabulary rows, the student's 8" in check_same_language(wide, folder, "k")
    with pytest.raises(UserError, match=r"k: its tokenizer has ids up to 2 \('c'\), its vocab_size is 2"):
        check_same_language(folder, write(tmp_path / "narrow", vocab_size=2), "k")


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (("a", "x", "c"), "another tokenizer: id 1 is 'x', the student's is 'b'"),
        (("a", "b"), "another tokenizer: id 2 is None, the student's is 'c'"),
        (("a", "b", "c", "d"), "another tokenizer: id 3 is 'd', the student's is None"),
    ],
)
def test_another_token_is_refused_by_id(folder, tmp_path, tokens, reason):
    with pytest.raises(UserError, match=reason):
        check_same_language(folder, write(tmp_path / "other", tokens), "k")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (TEMPLATE.replace("content", "role"), r"line 2 is '{{ m.role }}', the student's is '{{ m.content }}'"),
        (TEMPLATE + "\nmore", "line 4 is 'more', the student's is absent"),
        ("", "line 1 is absent, the student's is"),
    ],
)
def test_another_template_is_refused_by_line(folder, tmp_path, template, reason):
    with pytest.raises(UserError, match=reason):
        check_same_language(folder, write(tmp_path / "other", template=template), "k")


def test_of_long_lines_the_place_where_they_part_is_shown(folder, tmp_path):
    long = "{{ " + "x" * 200 + " }}"
    ours = write(tmp_path / "ours", template=long + "{{ role }}")
    with pytest.raises(UserError, match=r"is '\.\.\.x+ }}{{ content }}', the student's is '\.\.\.x+ }}{{ role }}'"):
        check_same_language(ours, write(tmp_path / "other", template=long + "{{ content }}"), "k")


def test_a_template_that_ends_otherwise_is_the_same(folder, tmp_path):
    other = write(tmp_path / "other", template=TEMPLATE.replace("\n", "\r\n") + "\n")
    assert check_same_language(folder, other, "k") == ""


def test_a_megatron_checkpoint_is_for_the_backend_that_reads_it_and_is_whole(folder, tmp_path):
    (saved := tmp_path / "step_1").mkdir()
    teacher = {"name": "t", "domain": "law", "effort": "low", "checkpoint": folder, "megatron_checkpoint": saved}

    def config(backend):
        return Config.model_validate(
            {
                "run": {"folder": "run", "num_steps": 1},
                "student": {"checkpoint": folder},
                "teachers": {"backend": backend, "models": [teacher]},
                "prompts": {"files": [], "batch_size": 1, "mixture": {"law": 1}},
                "environments": {},
                "rollout": {"max_response_tokens": 5},
            }
        )

    with pytest.raises(UserError, match=r"teachers.models.0 \(t\): the embedded backend reads no megatron_checkpoint"):
        check_teachers(config("embedded"))
    with pytest.raises(UserError, match="is not a checkpoint of this project"):
        check_teachers(config("megatron"))
    write_facts(saved, facts(1, Layout(), 1, True))
    assert check_teachers(config("megatron")) == [""]
