"""What a configuration asks of the teacher service, and all that can be refused before one is started. Torch-free."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_mopd.config import Config, Teacher
from megatron_mopd.doctor import find_gpus
from megatron_mopd.errors import UserError
from megatron_mopd.hf_folder import read_hf_config
from megatron_mopd.mcore.families import family_of
from megatron_mopd.mcore.gpu_options import check_here, check_teachers_options
from megatron_mopd.mcore.layout import Layout
from megatron_mopd.mcore.options import split_megatron_table
from megatron_mopd.servers import files
from megatron_mopd.servers.addresses import check_host, check_url, read_api_key, reserve_port
from megatron_mopd.servers.spec import ServerSpec

NAME = "service"
"""In RUN/endpoints."""
GRACE_S = 20.0
"""To finish what its ranks have in hand; whoever ends the keeper has hung up, so nothing else waits."""


def check_service(config: Config) -> None:
    """Raise UserError for what is wrong with the service of a run, given by URL or to be started."""
    if not config.teachers.on("megatron"):
        return
    urls = config.service.urls
    for i, url in enumerate(urls):
        check_url(url, f"service.urls.{i}")
        if url in urls[:i]:
            raise UserError(f"service.urls.{i}={url} is there twice; remove one")
    api_key(config)
    if not urls:
        check_served(config)


def check_served(config: Config) -> None:
    """Raise UserError for what `mopd serve-teacher` cannot serve, or not there."""
    table, hf_config = config.service, common_config(config.teachers.on("megatron"))
    try:
        split_megatron_table(table.megatron)
        Layout.from_table(table.megatron).check(hf_config, table.num_processes)
        check_teachers_options(table.megatron)
        check_here(table.megatron)
    except UserError as error:
        raise UserError(f"service.num_processes and service.megatron: {error}") from None
    check_host("service", table.host, has_key=api_key(config) is not None)


def check_port(config: Config) -> None:
    """Raise UserError where service.port is another process's. The keeper has a port of its own."""
    reserve_port(config.service.host, "service", config.service.port).close()


def common_config(teachers: Sequence[Teacher]) -> Mapping[str, Any]:
    """config.json of the teachers of a service. UserError for none, and for two of different architectures."""
    if not teachers:
        raise UserError("no teacher has backend megatron; set teachers.backend=megatron, or the backend of some")
    configs = {t.name: read_hf_config(t.checkpoint, f"teacher {t.name}") for t in teachers}
    architectures = {name: family_of(config).architecture(config) for name, config in configs.items()}
    first, *others = architectures
    for other in others:
        if architectures[other] != architectures[first]:
            raise UserError(
                f"teachers {first} and {other} are of different architectures, and a service serves one; set the "
                "backend of one of the two to sglang or embedded, or serve it from a configuration of its own"
            )
    return configs[first]


def api_key(config: Config) -> str | None:
    """Of the service, started or given by URL."""
    return read_api_key("service", config.service.api_key_env)


def given_urls(config: Config) -> tuple[str, ...]:
    """Of services that run already and that the run will wait for."""
    return config.service.urls if config.teachers.on("megatron") else ()


def server_specs(config: Config) -> list[ServerSpec]:
    """The service that the keeper starts, if the run needs one: `mopd serve-teacher` on the keeper's configuration."""
    if not config.teachers.on("megatron") or config.service.urls:
        return []
    on_cpu = not _has_gpu()
    spec = ServerSpec(
        name=NAME,
        log="service.log",
        table="service",
        python=Path(sys.executable),
        module="megatron_mopd.cli",
        arguments=("serve-teacher", str(files.folder(config.run.folder) / files.CONFIG)),
        address_arguments=("service.host={host}", "service.port={port}"),
        host=config.service.host,
        key_variable=config.service.api_key_env or None,
        takes_key_as_argument=False,
        start_timeout_s=config.service.start_timeout_s,
        on_cpu=on_cpu,
        grace_s=GRACE_S,
        variables=(("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1")),) if on_cpu else (),
    )
    return [spec]


@functools.cache
def _has_gpu() -> bool:
    return bool(find_gpus())
