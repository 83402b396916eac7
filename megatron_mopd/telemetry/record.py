"""The record of a run: `metrics.jsonl`, one JSON object per step, complete whatever becomes of the sinks.

    {"step": 12, "metrics": {"train/loss": -0.031, ...}, "timing": {"time/step_s": 1.7, ...}}

Promises: step numbers are unique and increase; `metrics` is the same, to the bit, for a run that was stopped and
resumed and one that was not (floats are written with all their digits), while what depends on the machine's speed is
apart in `timing`; strict JSON, a non-finite number is null. A line is flushed to the file system before `append`
returns.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from megatron_mopd.errors import UserError
from megatron_mopd.telemetry.registry import check_row, is_timing

FILE_NAME = "metrics.jsonl"


class Record:
    """Appends rows; opening it cuts the rows that a resumed run makes again."""

    def __init__(self, run_folder: Path, next_step: int) -> None:
        """`next_step` is the step of the next row: rows of this step and later, and a torn last line, are cut."""
        file = run_folder / FILE_NAME
        kept = [row for row in read_record(run_folder) if row["step"] < next_step] if file.exists() else []
        self._last_step = kept[-1]["step"] if kept else next_step - 1
        replace_file(file, "".join(_line(row) for row in kept))
        self._file = file.open("a", encoding="utf-8")

    def append(self, step: int, row: Mapping[str, float]) -> None:
        assert step > self._last_step, f"row of step {step} after the row of step {self._last_step}"
        check_row(row)
        finite = {key: value if math.isfinite(value) else None for key, value in sorted(row.items())}
        self._file.write(
            _line(
                {
                    "step": step,
                    "metrics": {key: value for key, value in finite.items() if not is_timing(key)},
                    "timing": {key: value for key, value in finite.items() if is_timing(key)},
                }
            )
        )
        self._file.flush()
        self._last_step = step

    def close(self) -> None:
        self._file.close()


def has_record(run_folder: Path) -> bool:
    return (run_folder / FILE_NAME).is_file()


def read_record(run_folder: Path) -> list[dict[str, Any]]:
    """The rows of a run; a last line that a killed run left unfinished is left out.

    Raises UserError for a folder without a record, and for a line that is not one of its rows.
    """
    file = run_folder / FILE_NAME
    if not file.is_file():
        raise UserError(f"{run_folder} holds no {FILE_NAME}; name the folder of a run (run.folder of its config)")
    *lines, _torn = file.read_bytes().split(b"\n")
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:  # no JSON, or no UTF-8
            row = None
        if not _is_row(row):
            raise UserError(f"{file}:{number} is not a row of metrics; delete this line and the ones after it to go on")
        rows.append(row)
    return rows


def _is_row(row: Any) -> TypeGuard[dict[str, Any]]:
    return (
        isinstance(row, dict)
        and isinstance(row.get("step"), int)
        and all(
            isinstance(row.get(part), dict) and all(_is_number_or_none(v) for v in row[part].values())
            for part in ("metrics", "timing")
        )
    )


def _is_number_or_none(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and math.isfinite(value))


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def replace_file(file: Path, text: str) -> None:
    """Write the whole file at once: a kill leaves the old one or the new one."""
    partial = file.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    os.replace(partial, file)
