"""What a configuration asks of the teacher service, and all that can be refused before one is started. Torch-free."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

from megatron_mopd.config import Config
from megatron_mopd.doctor import find_gpus
from megatron_mopd.errors import UserError
from megatron_mopd.hf_folder import check_weight_files, read_hf_config
from megatron_mopd.mcore.families import family_of
from megatron_mopd.mcore.layout import Layout
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
    teachers, table = config.teachers.on("megatron"), config.service
    if not teachers:
        raise UserError("nothing to serve: no teacher is on the backend megatron; set teachers.backend=megatron")
    first = None
    for teacher in teachers:
        key = f"teachers.models ({teacher.name})"
        hf_config = read_hf_config(teacher.checkpoint, key)
        check_weight_files(teacher.checkpoint, key)
        architecture = family_of(hf_config).architecture(hf_config)
        if first is None:
            first = architecture
            _check_layout(config, teacher.checkpoint)
        elif architecture != first:
            raise UserError(
                f"{key} has another architecture than {teachers[0].name}; a service serves one: set the backend of one "
                "of the two to sglang or embedded, or serve it from a configuration of its own"
            )
    check_host("service", table.host, has_key=api_key(config) is not None)
    if table.port:
        reserve_port(table.host, "service", table.port).close()


def _check_layout(config: Config, checkpoint: Path) -> None:
    layout = Layout.from_table(config.service.megatron)
    try:
        layout.check(read_hf_config(checkpoint), config.service.num_processes)
    except UserError as error:
        raise UserError(f"service.num_processes and service.megatron: {error}") from None


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
