"""Which servers a configuration needs, of whatever kind, and all that can be refused before one is started. Torch-free.

Each kind knows its own: `sglang/arguments.py` and `service/arguments.py`.
"""

from __future__ import annotations

from megatron_mopd.config import Config
from megatron_mopd.servers import files
from megatron_mopd.servers.addresses import answers
from megatron_mopd.servers.spec import ServerSpec
from megatron_mopd.service import arguments as service
from megatron_mopd.sglang import arguments as sglang


def server_specs(config: Config) -> list[ServerSpec]:
    """Every server to start: the student's, the teachers', the teacher service."""
    return [*sglang.server_specs(config), *service.server_specs(config)]


def check_servers(config: Config) -> None:
    """Raise UserError for whatever can be known before a server is started or asked."""
    sglang.check_servers(config)
    service.check_service(config)


def server_lines(config: Config) -> list[str]:
    """What a user should know while the run waits for its servers."""
    lines = []
    if (specs := server_specs(config)) and not files.is_served(config.run.folder):
        names = ", ".join(spec.name for spec in specs)
        in_turn = ", one at a time on a CPU" if any(spec.on_cpu for spec in specs) else ""
        lines.append(f"servers to start: {names}; this takes a while{in_turn}, see {config.run.folder}/logs")
    for option, timeout_s, urls in (
        ("sglang.start_timeout_s", config.sglang.start_timeout_s, sglang.given_urls(config)),
        ("service.start_timeout_s", config.service.start_timeout_s, service.given_urls(config)),
    ):
        if silent := [url for url in urls if not answers(url)]:
            lines.append(
                f"nothing answers at {', '.join(silent)} yet; the run waits at most {timeout_s:g} s ({option})"
            )
    return lines
