"""Demonstration files: JSONL and parquet, and what is refused of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_mopd.config import Prompts
from megatron_mopd.errors import UserError
from megatron_mopd.prompts.demonstrations import read_demonstrations
from megatron_mopd.prompts.source import PromptSource
from megatron_mopd.types import Cell

ASK = {"role": "user", "content": "17 * 3"}
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "mul", "arguments": {"a": 17}}}]}
SEEN = {"role": "tool", "content": "51"}
SAY = {"role": "assistant", "reasoning_content": "it says 51", "content": "51"}
LINE: dict[str, Any] = {"id": "d", "domain": "math", "effort": "low", "messages": [ASK, CALL, SEEN, SAY]}


def write(folder: Path, *lines: Any) -> Path:
    file = folder / "demonstrations.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return file


def test_a_line_becomes_a_demonstration(tmp_path: Path) -> None:
    (d,) = read_demonstrations([write(tmp_path, {**LINE, "metadata": {"n": 1}})])
    assert (d.id, d.cell, d.messages, d.metadata) == ("d", Cell("math", "low"), (ASK, CALL, SEEN, SAY), {"n": 1})


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not a JSON object"),
        ("[1]", "not a JSON object but a list"),
        ('{"id": "\\ud800"}', "surrogates not allowed"),
        ({**LINE, "domain": None}, "no 'domain'; a demonstration needs id, domain, messages"),
        ({**LINE, "effort": 3}, "'effort' must be a string, not 3"),
        ({**LINE, "label": "51"}, "unknown key 'label'"),
        ({**LINE}, "id 'd' was already used at"),
        ({**LINE, "messages": "hello"}, "'messages' must be a list"),
        ({**LINE, "messages": [ASK]}, "there is nothing to learn"),
        ({**LINE, "messages": [SAY]}, "there is nothing to learn"),
        ({**LINE, "messages": [ASK, {"role": "bot", "content": "51"}]}, "a message needs a role of system, user"),
        ({**LINE, "messages": [ASK, {"role": "assistant"}]}, "a message of the assistant says nothing"),
        ({**LINE, "messages": [{**ASK, "tool_calls": [1]}, SAY]}, "only an assistant's message has tool_calls"),
        ({**LINE, "messages": [ASK, {**SAY, "content": [1]}]}, "'content' of a message must be text, not"),
        ({**LINE, "messages": [ASK, {**SAY, "thoughts": "x"}]}, "a message has 'thoughts'; known: role, content"),
        ({**LINE, "metadata": [1]}, "'metadata' must be an object"),
    ],
)
def test_a_bad_line_is_refused_with_its_file_and_number(tmp_path: Path, line: Any, reason: str) -> None:
    file = write(tmp_path, LINE, "", line)
    with pytest.raises(UserError, match=reason) as error:
        read_demonstrations([file])
    assert f"{file}:3" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_and_another_encoding_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"does not exist; see demonstrations\.files"):
        read_demonstrations([tmp_path / "nowhere.jsonl"])
    file = write(tmp_path, LINE)
    file.write_bytes(json.dumps({**LINE, "id": "\xe9"}, ensure_ascii=False).encode("latin-1"))
    with pytest.raises(UserError, match=r"jsonl:1: not a JSON object: 'utf-8' codec"):
        read_demonstrations([file])


@pytest.mark.parametrize("as_text", [False, True])
def test_parquet_holds_the_same(tmp_path: Path, as_text: bool) -> None:
    """Rows of a struct column have every key of any of them; those without a value are absent."""
    import pyarrow
    from pyarrow import parquet

    other = {**LINE, "id": "e", "effort": None, "messages": [ASK, SAY]}
    rows = [{**row, "messages": json.dumps(row["messages"]) if as_text else row["messages"]} for row in (LINE, other)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    from_parquet = read_demonstrations([tmp_path / "d.parquet"])
    assert from_parquet == read_demonstrations([write(tmp_path, LINE, other)])
    (tmp_path / "cut.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"cut\.parquet cannot be read as parquet"):
        read_demonstrations([tmp_path / "cut.parquet"])


def test_parquet_without_its_reader_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "d.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match="reading parquet needs pyarrow; pip install pyarrow, or write JSONL"):
        read_demonstrations([tmp_path / "d.parquet"])


def test_a_step_draws_demonstrations_in_the_shares_of_the_mixture(tmp_path: Path) -> None:
    lines = [{**LINE, "id": f"{d}-{i}", "domain": d, "effort": e} for d in "ab" for e in ("low", "max") for i in [e, 1]]
    lines = [{**line, "id": f"{i}"} for i, line in enumerate(lines)]
    pool = read_demonstrations([write(tmp_path, *lines)])
    prompts = Prompts(batch_size=12, mixture={"a": 2.0, "b": 1.0}, efforts={"low": 1.0, "max": 1.0})
    drawn = PromptSource(pool, prompts, 0, "demonstration").draw(3)
    assert [d.cell for d in drawn].count(Cell("a", "low")) == 4
    assert all(d.cell == next(p for p in pool if p.id == d.id).cell for d in drawn)
    with pytest.raises(UserError, match=r"no demonstration for c/low; add some to demonstrations\.files"):
        PromptSource(pool, Prompts(batch_size=1, mixture={"c": 1.0}), 0, "demonstration")
