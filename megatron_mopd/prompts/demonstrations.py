"""Read demonstration files: conversations to learn from, JSONL or parquet, one a line, or sampled trajectories.

    {"id": "d-17", "domain": "math", "effort": "low", "messages": [{"role": "user", "content": "17 * 3"},
     {"role": "assistant", "reasoning_content": "10 * 3 + 7 * 3", "content": "51"}]}

Messages are those of chat templates: roles system, user, assistant and tool; assistant messages may have
`reasoning_content` and `tool_calls` and need no content then. `effort` says which level is shown; without it every
level may be drawn for it. `metadata` is for your own use. In a parquet file these are the columns; messages and
metadata may also be columns of JSON text. A line that is not such an object is refused with its file and number.

A .safetensors file holds trajectories (trajectory_file.py) such as `mopd sample-teachers` writes: the messages of the
prompt, and the tokens of the response, which are not tokenized again.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_mopd.errors import UserError
from megatron_mopd.trajectory_file import read_trajectories
from megatron_mopd.types import Cell

ROLES = ("system", "user", "assistant", "tool")
REQUIRED = ("id", "domain", "messages")
OPTIONAL = ("effort", "metadata")
MESSAGE_KEYS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")


class Response(NamedTuple):
    """What was sampled, and observed in between, as tokens: [R] int32, [R] bool."""

    token_ids: np.ndarray
    loss_mask: np.ndarray


@dataclass(frozen=True)
class Demonstration:
    """Example: Demonstration("d", "math", "low", ({"role": "user", "content": "1 + 1"}, {"role": "assistant", ...}))"""

    id: str
    domain: str
    effort: str
    messages: tuple[Mapping[str, Any], ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    response: Response | None = field(default=None, compare=False)
    """Follows the messages, which then end where the assistant begins."""

    @property
    def cell(self) -> Cell:
        return Cell(self.domain, self.effort)


def read_demonstrations(files: Iterable[Path]) -> list[Demonstration]:
    """All of the files in order; `effort` is "" where a line leaves it open. Ids are unique over the files."""
    demonstrations: list[Demonstration] = []
    seen: dict[str, str] = {}
    for file in files:
        if not file.is_file():
            raise UserError(f"demonstration file {file} does not exist; see demonstrations.files")
        for where, demonstration in _read(file):
            if demonstration.id in seen:
                raise UserError(f"{where}: id {demonstration.id!r} was already used at {seen[demonstration.id]}")
            seen[demonstration.id] = where
            demonstrations.append(demonstration)
    return demonstrations


def _read(file: Path) -> Iterator[tuple[str, Demonstration]]:
    """Each with where it stands."""
    if file.suffix == ".safetensors":
        yield from _trajectories(file)
        return
    for where, row in _parquet_rows(file) if file.suffix == ".parquet" else _json_rows(file):
        yield where, _parse(row, where)


def _trajectories(file: Path) -> Iterator[tuple[str, Demonstration]]:
    try:
        of_file = read_trajectories(file)
    except UserError as error:
        raise UserError(f"{error}; of .safetensors only what `mopd sample-teachers` writes is read") from None
    for sampled in of_file:
        trajectory, prompt = sampled.trajectory, sampled.trajectory.prompt.prompt
        response = Response(trajectory.response_ids, trajectory.loss_mask)
        yield (
            f"{file}: trajectory {trajectory.id}",
            Demonstration(trajectory.id, prompt.domain, prompt.effort, prompt.messages, response=response),
        )


def _json_rows(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"{file}:{number}", _json(line, f"{file}:{number}")


def _json(text: str | bytes, where: str) -> Any:
    try:
        value = json.loads(text.decode("utf-8-sig") if isinstance(text, bytes) else text)
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text
        return value
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not a JSON object: {error}") from None


def _parquet_rows(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError(f"{file}: reading parquet needs pyarrow; pip install pyarrow, or write JSONL") from None
    try:
        table = parquet.read_table(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{file} cannot be read as parquet: {error}") from None
    for number, row in enumerate(table.to_pylist(), start=1):
        where = f"{file}: row {number}"
        for name in ("messages", "metadata"):
            if isinstance(row.get(name), str):
                row[name] = _json(row[name], where)
        yield where, _without_nulls(row)


def _without_nulls(value: Any) -> Any:
    """Parquet gives every row all keys that any row has."""
    if isinstance(value, dict):
        return {key: _without_nulls(v) for key, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


def _parse(row: Any, where: str) -> Demonstration:
    if not isinstance(row, dict):
        raise UserError(f"{where}: not a JSON object but a {type(row).__name__}")
    for name in REQUIRED:
        if not row.get(name):
            raise UserError(f"{where}: no {name!r}; a demonstration needs {', '.join(REQUIRED)}")
    if unknown := sorted(row.keys() - {*REQUIRED, *OPTIONAL}):
        raise UserError(f"{where}: unknown key {unknown[0]!r}; put your own values under 'metadata'")
    for name in ("id", "domain", "effort"):
        if not isinstance(row.get(name) or "", str):
            raise UserError(f"{where}: {name!r} must be a string, not {reprlib.repr(row[name])}")
    if not isinstance(row.get("metadata") or {}, dict):
        raise UserError(f"{where}: 'metadata' must be an object, not {reprlib.repr(row['metadata'])}")
    if not isinstance(row["messages"], list):
        raise UserError(f"{where}: 'messages' must be a list of objects with 'role'")
    for message in row["messages"]:
        _check_message(message, where)
    if row["messages"][0]["role"] == "assistant" or all(m["role"] != "assistant" for m in row["messages"]):
        raise UserError(f"{where}: there is nothing to learn: an assistant's message must follow another one")
    return Demonstration(
        row["id"], row["domain"], row.get("effort") or "", tuple(row["messages"]), row.get("metadata") or {}
    )


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise UserError(f"{where}: a message needs a role of {', '.join(ROLES)}, not {reprlib.repr(message)}")
    role = message["role"]
    if unknown := sorted(message.keys() - set(MESSAGE_KEYS)):
        raise UserError(f"{where}: a message has {unknown[0]!r}; known: {', '.join(MESSAGE_KEYS)}")
    for name in ("content", "reasoning_content"):
        if not isinstance(message.get(name) or "", str):
            raise UserError(f"{where}: {name!r} of a message must be text, not {reprlib.repr(message[name])}")
    if not isinstance(message.get("tool_calls") or [], list):
        raise UserError(f"{where}: 'tool_calls' must be a list, not {reprlib.repr(message['tool_calls'])}")
    if role != "assistant" and (message.get("tool_calls") or message.get("reasoning_content")):
        raise UserError(f"{where}: only an assistant's message has tool_calls or reasoning_content, not the {role}'s")
    if message.get("content") is None and not (message.get("tool_calls") or message.get("reasoning_content")):
        raise UserError(f"{where}: a message of the {role} says nothing; it needs 'content'")
