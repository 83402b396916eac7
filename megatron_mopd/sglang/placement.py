"""Which servers a configuration needs, by name, and which teacher lives on which. Pure functions of the configuration.

Promise: the keeper, the engine and the scorer all read the placement from here.
"""

from __future__ import annotations

from megatron_mopd.config import Config, Teacher
from megatron_mopd.errors import UserError

INITIAL_VERSION = "initial"
"""`weight_version` of a server that was just started, or started again: it holds the checkpoint that it began with."""


def student_servers(config: Config) -> tuple[str, ...]:
    """Names of the student servers to start: none where the engine is embedded or URLs are given."""
    if config.rollout.engine != "sglang" or config.sglang.student.urls:
        return ()
    return tuple(f"student-{i}" for i in range(config.sglang.student.num_servers))


def teacher_servers(config: Config) -> dict[str, str]:
    """Teacher to the server to start for it, without the teachers that have a URL.

    They are dealt out in turn: of n servers, teachers-k begins with the k-th of these teachers, and also serves the
    (k + n)-th, the (k + 2n)-th, ... Raises UserError for more servers than teachers.
    """
    teachers = started_teachers(config)
    num_servers = config.sglang.teachers.num_servers or len(teachers)
    if num_servers > len(teachers) > 0:
        raise UserError(
            f"sglang.teachers.num_servers={num_servers}, but {len(teachers)} teachers need a server; "
            f"set at most {len(teachers)}, or null for one each"
        )
    return {teacher.name: f"teachers-{i % num_servers}" for i, teacher in enumerate(teachers)}


def started_teachers(config: Config) -> list[Teacher]:
    """The teachers that are served from here, in the order of teachers.models."""
    urls = config.sglang.teachers.urls
    if unknown := sorted(urls.keys() - {t.name for t in config.teachers.models}):
        raise UserError(f"sglang.teachers.urls.{unknown[0]}: no teacher of this name is in teachers.models")
    return [t for t in config.teachers.models if t.name not in urls] if config.teachers.backend == "sglang" else []
