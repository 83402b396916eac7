"""What has been made, and from what: one record per stage, FOLDER/pipeline/NAME.json.

A stage's *key* is a hash of its command, its product, the bytes of its input files and the stamps of its needs. A need
that is made again gets a new stamp, whatever came out; so all that follows from it is made again too.

    (no record)  --begin-->  begun  --command succeeded-->  done
                               |----command failed------->  failed

The record is written beside its place and renamed, `begun` before anything is touched and `done` after all is there: a
kill at any moment leaves a record that says how to go on. Promises (tests/unit/test_pipeline_runs.py): a stage is
done if and only if its record says so under today's key, its needs are done and its product exists.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_mopd.errors import UserError
from megatron_mopd.pipeline.graph import Pipeline, Stage
from megatron_mopd.telemetry.record import replace_file

VALUES = re.compile(r"[^\s=,:\[\](){}'\"]+")
"""In an option: a.b=FILE, a.b=[FILE, FILE]."""


@dataclass(frozen=True)
class Record:
    """`cleared`: what an older key left is out of the way, so that what is there is of this key."""

    key: str
    state: str  # begun | failed | done
    begun_at: float
    cleared: bool = False
    ended_at: float | None = None
    code: int | None = None

    @property
    def stamp(self) -> str:
        """What those that need the stage depend on: also when it was made."""
        return f"{self.key} {self.ended_at}"

    @property
    def seconds(self) -> float | None:
        return None if self.ended_at is None else self.ended_at - self.begun_at


class Stamps:
    """The records of a pipeline's stages. Nothing is kept in memory: others may be writing them."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.folder = pipeline.folder / "pipeline"

    def lock_file(self, stage: Stage) -> Path:
        return self.folder / f"{stage.name}.lock"

    def log_file(self, stage: Stage) -> Path:
        return self.pipeline.folder / "logs" / f"{stage.name}.log"

    def read(self, stage: Stage) -> Record | None:
        file = self.folder / f"{stage.name}.json"
        if not file.is_file():
            return None
        try:
            return Record(**json.loads(file.read_bytes()))
        except (ValueError, TypeError):
            raise UserError(f"{file} is not a record of a stage; remove it, and {stage.produces} with it") from None

    def write(self, stage: Stage, record: Record) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(self.folder / f"{stage.name}.json", json.dumps(asdict(record), indent=2) + "\n")

    def key(self, stage: Stage) -> str:
        """Of a stage whose needs are done. UserError where an input is not there."""
        digest = hashlib.sha256()
        for part in self._parts(stage):
            digest.update(f"{len(part)}:{part}".encode())
        return digest.hexdigest()[:32]

    def _parts(self, stage: Stage) -> Iterator[str]:
        yield from (*stage.command, str(stage.produces))
        for file in self.input_files(stage):
            yield from (str(file), _hash_of(file, stage))
        for need in sorted(stage.needs):
            record = self.read(self.pipeline.by_name[need])
            yield f"{need} {record.stamp if record else None}"

    def input_files(self, stage: Stage) -> list[Path]:
        """Those it names, and files outside the pipeline's folder that stand in its command: as words, or as values of
        options."""
        inside = self.pipeline.folder.resolve()
        values = {Path(value) for word in stage.command[1:] for value in (word, *VALUES.findall(word)) if value}
        named = [file for file in values if _is_file(file) and not file.resolve().is_relative_to(inside)]
        return sorted({*stage.inputs, *named})

    def done(self) -> set[str]:
        """Names of the stages that are."""
        found: set[str] = set()
        for stage in self.pipeline.ordered:
            if found.issuperset(stage.needs) and self._is_made(stage):
                found.add(stage.name)
        return found

    def _is_made(self, stage: Stage) -> bool:
        """Its needs are done; is it, too?"""
        record = self.read(stage)
        if record is None or record.state != "done" or not stage.produces.exists():
            return False
        return record.key == self.key(stage)

    def begin(self, stage: Stage) -> Record:
        """The record under which the stage is now made; what an older key has left is moved out of its way."""
        old, key, now = self.read(stage), self.key(stage), time.time()
        if old is None and stage.produces.exists():
            raise UserError(
                f"stage {stage.name}: {stage.produces} is there, and this pipeline has not made it; move it away, or "
                "let the stage produce something else"
            )
        if old is not None and old.key == key and old.cleared:
            record = Record(key, "begun", now, cleared=True)
            self.write(stage, record)
            return record
        self.write(stage, Record(key, "begun", now))
        self._move_aside(stage)
        record = Record(key, "begun", now, cleared=True)
        self.write(stage, record)
        return record

    def _move_aside(self, stage: Stage) -> None:
        """To FOLDER/pipeline/replaced: a training run costs too much to be deleted for a changed comment."""
        if not stage.produces.exists():
            return
        replaced = self.folder / "replaced"
        replaced.mkdir(parents=True, exist_ok=True)
        number = sum(file.name.startswith(f"{stage.name}.") for file in replaced.iterdir())
        while (place := replaced / f"{stage.name}.{number}").exists():
            number += 1
        stage.produces.rename(place)


def _is_file(file: Path) -> bool:
    try:
        return file.is_file()
    except (OSError, ValueError):  # a long word of another kind
        return False


def _hash_of(file: Path, stage: Stage) -> str:
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"stage {stage.name}: its input {file} cannot be read: {error.strerror}") from None
