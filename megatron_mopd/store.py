"""The trajectory store: where the driver's loop and the trainer's loop meet.

One folder per step, `RUN/trajectories/step_00000012/`: `batch.safetensors` (the columns of batch.Batch), `rows.jsonl`
(one readable line per row), `rollout.json` (the driver's metrics, unless the rows are demonstrations) and, where lanes
were left behind, `unscored.safetensors` (the trajectories that wait for their teachers), and where trajectories were
left in flight, `pool.json` (where the token log has them, rollout/token_log.py). A folder appears whole, by rename, or
not at all. `step_00000012.sampled` is what was sampled for a step that its lanes could not finish, `.pool` what that
left in flight.

The file knows no parallel layout: each rank opens it and reads the rows that it trains on, so nothing large passes
through rank 0 and a recorded batch can be trained again at any layout.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from megatron_mopd.batch import OPTIONAL_COLUMNS, TOKEN_COLUMNS, Batch
from megatron_mopd.errors import UserError
from megatron_mopd.rollout.token_log import Cut
from megatron_mopd.telemetry.record import replace_file
from megatron_mopd.trajectory_file import Sampled, read_trajectories, write_trajectories
from megatron_mopd.types import Cell, Graded

UNSCORED, POOL = "unscored.safetensors", "pool.json"


class StoredBatch:
    """A batch on disk with the interface of batch.Batch; `select` reads only the rows asked for."""

    def __init__(self, file: Path) -> None:
        self._file = safe_open(str(file), framework="numpy")
        self.cells = tuple(Cell(*cell) for cell in json.loads(self._file.metadata()["cells"]))
        self.offsets: np.ndarray = self._file.get_tensor("offsets")
        self.cell: np.ndarray = self._file.get_tensor("cell")
        self.loss_tokens: np.ndarray = self._file.get_tensor("loss_tokens")
        self.lengths: np.ndarray = np.diff(self.offsets)
        self.outcome_advantage: np.ndarray | None = None
        if "outcome_advantage" in self._file.keys():  # noqa: SIM118 (no container)
            self.outcome_advantage = self._file.get_tensor("outcome_advantage")

    def __len__(self) -> int:
        return len(self.cell)

    @property
    def advantage_sums(self) -> np.ndarray:
        return self._file.get_tensor("advantage_sums")

    def select(self, rows: Sequence[int], optional: Collection[str] | None = None) -> Batch:
        chosen = np.asarray(rows, np.int64)
        columns = {}
        there = set(OPTIONAL_COLUMNS if optional is None else optional) & set(self._file.keys())
        for name in (*TOKEN_COLUMNS, *there):
            column = self._file.get_slice(name)
            parts = [column[int(self.offsets[i]) : int(self.offsets[i + 1])] for i in chosen]
            columns[name] = np.concatenate(parts or [column[0:0]])
        offsets = np.concatenate([[0], np.cumsum(self.lengths[chosen])]).astype(np.int64)
        advantage = None if self.outcome_advantage is None else self.outcome_advantage[chosen]
        return Batch(offsets=offsets, cell=self.cell[chosen], cells=self.cells, outcome_advantage=advantage, **columns)


class TrajectoryStore:
    def __init__(self, run_folder: Path) -> None:
        self._folder, self._checkpoints = run_folder / "trajectories", run_folder / "checkpoints"

    def folder(self, step: int) -> Path:
        return self._folder / f"step_{step:08d}"

    def has(self, step: int) -> bool:
        return self.folder(step).is_dir()

    def write(
        self,
        step: int,
        graded: Sequence[Graded],
        cells: Sequence[Cell],
        rollout: Mapping[str, Any],
        unscored: Sequence[Sampled] = (),
        outcome_advantage: np.ndarray | None = None,
        pool: Cut | None = None,
    ) -> None:
        """Write the graded batch of `step` with the driver's metrics; replaces nothing that is already there."""
        batch = Batch.from_graded(graded, cells, outcome_advantage)
        with self._whole_folder(step) as partial:
            _write_step(partial, batch, [_row(g) for g in graded])
            (partial / "rollout.json").write_text(json.dumps(rollout))
            if unscored:
                write_trajectories(partial / UNSCORED, unscored)
            if pool is not None:
                (partial / POOL).write_text(json.dumps(pool))
        self._sampled(step).unlink(missing_ok=True)
        self._pool(step).unlink(missing_ok=True)

    def write_demonstrations(self, step: int, batch: Batch, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write a batch that nobody sampled, with a readable line for each of its rows."""
        with self._whole_folder(step) as partial:
            _write_step(partial, batch, rows)

    @contextmanager
    def _whole_folder(self, step: int) -> Iterator[Path]:
        """What is written into the folder that it gives appears as that of `step`, all at once."""
        partial = self.folder(step).with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        os.rename(partial, self.folder(step))

    def keep(self, step: int, sampled: Sequence[Sampled], pool: Cut | None = None) -> None:
        """What was sampled for a step that could not be finished, for the process that takes it up again."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if pool is not None:
            replace_file(self._pool(step), json.dumps(pool))
        partial = self._sampled(step).with_suffix(".partial")
        write_trajectories(partial, sampled)
        os.replace(partial, self._sampled(step))

    def kept(self, step: int) -> list[Sampled]:
        file = self._sampled(step)
        return read_trajectories(file) if file.exists() else []

    def unscored(self, step: int) -> list[Sampled]:
        """The trajectories that `step` was written without."""
        file = self.folder(step) / UNSCORED
        return read_trajectories(file) if file.exists() else []

    def pool_after(self, step: int) -> Cut | None:
        """Where the token log has what `step` left in flight; None where it left nothing."""
        for file in (self.folder(step) / POOL, self._pool(step)):
            if file.exists():
                return _read_cut(file)
        return None

    def first_needed(self, step: int) -> int:
        """The first file of the token log that is needed to go on after `step`, or from a checkpoint."""
        saved = (path.name.removeprefix("step_") for path in self._checkpoints.glob("step_*"))
        steps = {step, *(int(name) - 1 for name in saved if name.isdecimal())}
        return min((cut.first for s in steps if (cut := self.pool_after(s)) is not None), default=step + 1)

    def _pool(self, step: int) -> Path:
        return self.folder(step).with_suffix(".pool")

    def _sampled(self, step: int) -> Path:
        return self.folder(step).with_suffix(".sampled")

    def read(self, step: int) -> StoredBatch:
        return StoredBatch(self.folder(step) / "batch.safetensors")

    def rollout(self, step: int) -> dict[str, Any] | None:
        """The driver's metrics; None of demonstrations."""
        file = self.folder(step) / "rollout.json"
        return json.loads(file.read_text()) if file.exists() else None

    def cut(self, step: int) -> None:
        """Forget the batches of `step` and later: a resumed run samples them again. What was sampled for `step` itself
        came from the weights that the run has now."""
        for path in sorted(self._folder.glob("step_*")):
            number, _, kind = path.name.removeprefix("step_").partition(".")
            if not number.isdecimal() or int(number) < step:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            elif int(number) > step or kind not in ("sampled", "pool"):
                path.unlink()


def _read_cut(file: Path) -> Cut:
    try:
        first, step, size = json.loads(file.read_text())
        if not all(type(n) is int and n >= 0 for n in (first, step, size)) or first > step:
            raise ValueError(f"[{first!r}, {step!r}, {size!r}]")
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{file} does not say where the token log has what is in flight: {' '.join(str(error).split())}; put it "
            "back as it was, or remove it, which loses what is in flight"
        ) from error
    return Cut(first, step, size)


ROW_COLUMNS = ("loss_tokens", "advantage_sums")
"""What a rank must know of every row, so that it reads the tokens of its own alone."""


def _write_step(folder: Path, batch: Batch, rows: Sequence[Mapping[str, Any]]) -> None:
    write_batch(folder / "batch.safetensors", batch)
    with (folder / "rows.jsonl").open("w") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)


def write_batch(file: Path, batch: Batch) -> None:
    columns = {name: getattr(batch, name) for name in ("offsets", "cell", *ROW_COLUMNS)} | batch.token_columns
    columns["loss_tokens"] = np.asarray(columns["loss_tokens"], np.int64)
    if batch.outcome_advantage is not None:
        columns["outcome_advantage"] = batch.outcome_advantage
    save_file(columns, file, metadata={"cells": json.dumps(batch.cells)})


def _row(graded: Graded) -> dict[str, Any]:
    t = graded.trajectory
    outcome = t.outcome
    return {
        "id": t.id,
        "prompt": t.prompt.prompt.id,
        "domain": t.prompt.prompt.domain,
        "effort": t.prompt.prompt.effort,
        "group": t.group,
        "teacher": graded.teacher,
        "finish_reason": t.finish_reason,
        "segments": len(t.segments),
        "response_tokens": len(t.response_ids),
        "reward": outcome and outcome.reward,
        "spent_tokens": outcome and outcome.spent_tokens,
        "budget_tokens": outcome and outcome.budget_tokens,
    }
