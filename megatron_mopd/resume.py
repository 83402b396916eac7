"""What a run folder says of the run that it holds: the newest checkpoint, whether it is whole, and where it fits.

Torch-free, so that preflight refuses what cannot be continued, and says what has changed, before a model is built.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from megatron_mopd.config import Config, Teacher
from megatron_mopd.errors import UserError
from megatron_mopd.mcore.layout import Layout
from megatron_mopd.teachers.identity import fingerprint
from megatron_mopd.yaml_tree import read_yaml

FACTS_FILE, TRACKER_FILE = "learner.json", "latest"
PLACE = ("layout", "processes", "optimizer")
"""The facts that must be the same when a run continues."""
TEACHERS = "teachers"
"""The fact that says who they were: name to fingerprint."""

QUANTIZATION = "quantization"
"""The fact that says what is served of the weights: the format of routed experts and its rule."""


def latest(folder: Path) -> Path | None:
    """The checkpoint that `latest` names, or None where nothing was saved. Raises UserError where it is gone."""
    tracker = folder / TRACKER_FILE
    if not tracker.is_file():
        return None
    name = tracker.read_text(errors="replace").strip()
    if not name or not (folder / name).is_dir():
        raise UserError(f"{tracker} names {folder / name}, which does not exist; write the name of another one in it")
    return folder / name


def facts(step: int, layout: Layout, processes: int, distributed_optimizer: bool) -> dict[str, Any]:
    optimizer = "distributed" if distributed_optimizer else "plain"
    return {"step": step, "layout": asdict(layout), "processes": processes, "optimizer": optimizer}


@cache
def teacher_facts(teachers: tuple[Teacher, ...]) -> dict[str, dict[str, Any]]:
    """Name to fingerprint, as the teachers were when this process first asked: those that it trains with."""
    return {t.name: asdict(fingerprint(t.checkpoint, t.megatron_checkpoint, f"teacher {t.name}")) for t in teachers}


def write_facts(checkpoint: Path, saved: Mapping[str, Any]) -> None:
    """Last of all files: it holds the sizes of the others."""
    sizes = {file.name: file.stat().st_size for file in sorted(checkpoint.iterdir())}
    (checkpoint / FACTS_FILE).write_text(json.dumps({**saved, "files": sizes}))


def read_facts(checkpoint: Path) -> dict[str, Any]:
    """What `write_facts` wrote. UserError where the folder is no checkpoint, or a file is missing or was cut."""
    try:
        saved = json.loads((checkpoint / FACTS_FILE).read_text())
        sizes = dict(saved["files"])
        if missing := {"step", *PLACE} - saved.keys():
            raise ValueError(f"{FACTS_FILE} has no {', '.join(sorted(missing))}")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{checkpoint} is not a checkpoint of this project: {error}") from None
    for name, size in sizes.items():
        file = checkpoint / name
        if not file.is_file() or file.stat().st_size != size:
            raise UserError(
                f"{file} is not as it was written ({size} bytes); name an older checkpoint in "
                f"{checkpoint.parent / TRACKER_FILE}"
            )
    return saved


def check_place(checkpoint: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name in PLACE:
        if saved[name] != now[name]:
            raise UserError(
                f"checkpoint {checkpoint} was saved with {name} {saved[name]} and this run has {now[name]}; "
                "continue with the same, or start a new run from its weights"
            )


def check_teachers(checkpoint: Path, saved: Mapping[str, Any], teachers: tuple[Teacher, ...]) -> str:
    """Refuse a teacher that is another than the one of this name in the checkpoint; teachers may come and go.

    Returns "", or what to say of a checkpoint that was saved before they were recorded.
    """
    if TEACHERS not in saved:
        return f"{checkpoint} does not say who its teachers were: they are taken to be the same"
    for teacher in teachers:
        then, now = saved[TEACHERS].get(teacher.name), teacher_facts(teachers)[teacher.name]
        if then is None:
            continue
        for part, value in now.items():
            if then[part] != value:
                raise UserError(
                    f"checkpoint {checkpoint} was saved with teacher {teacher.name} of {part} {_short(then[part])} and "
                    f"{teacher.checkpoint} now has {_short(value)}; put the old teacher back, or give the new one "
                    "another name under teachers.models"
                )
    return ""


def check_resume(config: Config, world_size: int) -> str:
    """Refuse a run that cannot continue what its folder holds; say from where it goes on, and what changed.

    Returns "" for a new run.
    """
    checkpoint, teachers = latest(config.run.folder / "checkpoints"), config.teachers.models
    teacher_facts(teachers)  # of a new run too: its checkpoints will say who they were now
    if checkpoint is None:
        return ""
    saved = read_facts(checkpoint)
    distributed = bool(config.megatron.get("use_distributed_optimizer", True))
    check_place(checkpoint, saved, facts(0, Layout.from_table(config.megatron), world_size, distributed))
    changes = dict(_changes(read_yaml(config.run.folder / "config.yaml"), json.loads(config.model_dump_json())))
    if student := changes.get("student.checkpoint"):
        raise UserError(f"{config.run.folder} holds a run with student.checkpoint{student}; choose another run.folder")
    with_changes = " with " + ", ".join(key + change for key, change in changes.items()) if changes else ""
    unknown_teachers = check_teachers(checkpoint, saved, teachers)
    return "\n".join(filter(None, (f"continues {checkpoint}{with_changes}", unknown_teachers)))


def _short(value: str | int) -> str:
    return str(value)[:16]


def _changes(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Example: ("run.seed", "=1 (was 0)")."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from _changes(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
    elif old != new:
        yield path, f"={reprlib.repr(new)} (was {reprlib.repr(old)})"
