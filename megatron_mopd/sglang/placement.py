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


def teacher_servers(config: Config) -> dict[str, tuple[str, ...]]:
    """Teacher to the servers to start for it, without the teachers that have a URL.

    They are dealt out in turn. Of n servers for t teachers, teachers-k begins with the k-th of them, and also serves
    the (k + n)-th, the (k + 2n)-th, ...; where there are more servers than teachers, teachers-(k + t) is one more for
    the k-th.
    """
    teachers = started_teachers(config)
    num_servers = config.sglang.teachers.num_servers or len(teachers)
    if num_servers < len(teachers):
        return {teacher.name: (f"teachers-{i % num_servers}",) for i, teacher in enumerate(teachers)}
    return {
        t.name: tuple(f"teachers-{k}" for k in range(i, num_servers, len(teachers))) for i, t in enumerate(teachers)
    }


def started_teachers(config: Config) -> list[Teacher]:
    """The teachers that are served from here, in the order of teachers.models."""
    urls, teachers = config.sglang.teachers.urls, config.teachers.on("sglang")
    if teachers and (unknown := sorted(urls.keys() - {t.name for t in teachers})):
        raise UserError(f"sglang.teachers.urls.{unknown[0]}: no teacher of this name is on the backend sglang")
    return [t for t in teachers if not urls.get(t.name)]
