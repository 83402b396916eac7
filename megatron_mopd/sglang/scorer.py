"""The teachers of a run that live on SGLang servers: those that were started for it, and those given by URL."""

from __future__ import annotations

from pathlib import Path

from megatron_mopd.config import Config
from megatron_mopd.servers.launch import endpoints
from megatron_mopd.sglang.arguments import api_key
from megatron_mopd.sglang.placement import teacher_servers
from megatron_mopd.sglang.teacher_server import TeacherPlace, TeacherServer


def teacher_endpoints(config: Config) -> dict[str, list[TeacherServer]]:
    """The servers of each teacher: more than one where it has replicas, one for several teachers that take turns."""
    checkpoints = {t.name: t.checkpoint for t in config.teachers.on("sglang")}
    started = teacher_servers(config)
    urls = endpoints(config.run.folder) if started else {}
    shared: dict[str, dict[str, Path]] = {}
    for teacher, names in started.items():
        for name in names:
            shared.setdefault(urls[name], {})[teacher] = checkpoints[teacher]
    places = [TeacherPlace(url, teachers, may_load=True) for url, teachers in shared.items()]
    for teacher, given in config.sglang.teachers.urls.items():
        places += [TeacherPlace(url, {teacher: checkpoints[teacher]}, may_load=False) for url in given]
    found: dict[str, list[TeacherServer]] = {}
    for place in places:
        server = TeacherServer(
            place,
            config.sglang.request_timeout_s,
            temperature=config.rollout.temperature,
            min_input_tokens=config.rollout.max_response_tokens + 1,
            api_key=api_key(config),
        )
        for teacher in place.checkpoints:
            found.setdefault(teacher, []).append(server)
    return found
