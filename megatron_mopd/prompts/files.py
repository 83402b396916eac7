"""Read prompt files: JSONL, one prompt a line.

    {"id": "gen-17", "domain": "general", "environment": "sums", "messages": [{"role": "user", "content": "1 + 1"}],
    "label": "2"}

`effort` restricts a prompt to one effort level; without it every level may be drawn for it. `budget_tokens` is what the
problem takes, b0(x): a trajectory may spend `budgets.tau` times as much. `label` and `metadata` are the environment's
own. A line that is not such an object is refused with its file and number.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable
from pathlib import Path

from megatron_mopd.errors import UserError
from megatron_mopd.types import Prompt

REQUIRED = ("id", "domain", "environment", "messages")
OPTIONAL = ("effort", "label", "metadata", "budget_tokens")
MOST_TOKENS = 1e12


def read_prompts(files: Iterable[Path]) -> list[Prompt]:
    """All prompts of the files in order; `effort` is "" where a line leaves it open. Ids are unique over the files."""
    prompts: list[Prompt] = []
    seen: dict[str, str] = {}
    for file in files:
        if not file.is_file():
            raise UserError(f"prompt file {file} does not exist; see prompts.files")
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                where = f"{file}:{number}"
                prompt = _parse(line, where)
                if prompt.id in seen:
                    raise UserError(f"{where}: prompt id {prompt.id!r} was already used at {seen[prompt.id]}")
                seen[prompt.id] = where
                prompts.append(prompt)
    return prompts


def task_of(prompt: Prompt) -> str:
    """What a prompt asks: equal for two lines that differ in id, effort and budget alone."""
    metadata = {name: value for name, value in prompt.metadata.items() if name != "budget"}  # of `mopd budgets`
    return json.dumps([prompt.domain, prompt.environment, prompt.messages, prompt.label, metadata], sort_keys=True)


def _parse(line: bytes, where: str) -> Prompt:
    try:
        row = json.loads(line.decode("utf-8-sig"), parse_constant=_refuse_constant)
        if b"\\u" in line:
            json.dumps(row, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, a number of thousands of digits
        raise UserError(f"{where}: not a JSON object: {error}") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: not a JSON object but a {type(row).__name__}")
    for name in REQUIRED:
        if not row.get(name):
            raise UserError(f"{where}: no {name!r}; a prompt needs {', '.join(REQUIRED)}")
    unknown = sorted(row.keys() - {*REQUIRED, *OPTIONAL})
    if unknown:
        raise UserError(f"{where}: unknown key {unknown[0]!r}; put your own values under 'metadata'")
    for name in ("id", "domain", "environment", "effort"):
        if not isinstance(row.get(name) or "", str):
            raise UserError(f"{where}: {name!r} must be a string, not {row[name]!r}")
    if not isinstance(row.get("metadata") or {}, dict):
        raise UserError(f"{where}: 'metadata' must be an object, not {reprlib.repr(row['metadata'])}")
    budget = row.get("budget_tokens")
    if budget is not None and not (type(budget) in (int, float) and 0 < budget < MOST_TOKENS):
        raise UserError(f"{where}: 'budget_tokens' must be a number above 0, not {reprlib.repr(budget)}")
    messages = row["messages"]
    if not (
        isinstance(messages, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages)
    ):
        raise UserError(f"{where}: 'messages' must be a list of objects with 'role' and 'content'")
    return Prompt(
        id=row["id"],
        domain=row["domain"],
        effort=row.get("effort") or "",
        environment=row["environment"],
        messages=tuple(messages),
        label=row.get("label"),
        metadata=row.get("metadata") or {},
        budget_tokens=None if budget is None else float(budget),
    )


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
