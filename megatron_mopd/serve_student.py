"""`mopd gateway`: the student of a configuration behind the gateway, for harnesses that play with it by themselves.

A client opens a session (POST /sessions with a domain and perhaps id and effort), plays at its base path, and ends it
(DELETE): the trajectory is then RUN/gateway/ID.safetensors, in the format of trajectory_file.py. It serves until Ctrl-C
or SIGTERM; sessions that are open then are lost.

Promises: tests/unit/test_serve_student.py.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_mopd import build
from megatron_mopd.config import Config
from megatron_mopd.hf_folder import read_hf_config
from megatron_mopd.prompts.render import Renderer
from megatron_mopd.rollout.chat_request import Refused
from megatron_mopd.rollout.gateway import Gateway
from megatron_mopd.rollout.turns import NAME
from megatron_mopd.servers.addresses import read_api_key
from megatron_mopd.trajectory_file import Sampled, write_trajectories
from megatron_mopd.types import Prompt, Trajectory

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve_student(config: Config) -> None:
    renderer = Renderer.of_student(config)
    folder = config.run.folder / "gateway"
    with build.student_servers(config):
        asyncio.run(_serve(config, renderer, folder))


async def _serve(config: Config, renderer: Renderer, folder: Path) -> None:
    engine = build.rollout_engine(config, None)
    gateway = Gateway(
        engine,
        renderer,
        max_response_tokens=config.rollout.max_response_tokens,
        max_tokens=read_hf_config(config.student.checkpoint, "student.checkpoint")["max_position_embeddings"],
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        host=config.gateway.host,
        port=config.gateway.port,
        api_key=read_api_key("gateway", config.gateway.api_key_env),
        new_prompt=lambda row: read_prompt(row, config),
        on_finished=lambda trajectory: keep(trajectory, folder),
    )
    asked = asyncio.Event()
    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    try:
        await engine.start()
        folder.mkdir(parents=True, exist_ok=True)
        print(f"gateway: {await gateway.start()}; finished trajectories go to {folder}", flush=True)
        await asked.wait()
    finally:
        await gateway.stop()
        await engine.close()


def read_prompt(row: Mapping[str, Any], config: Config) -> Prompt:
    """What a client says of its session: {"domain": "agents", "effort": "low", "id": "task-3"}."""
    domain, effort, name = row.get("domain"), row.get("effort") or "", row.get("id") or secrets.token_hex(8)
    if unknown := sorted(row.keys() - {"domain", "effort", "id"}):
        raise Refused(400, f"{unknown[0]!r} is not known; a session has domain, effort and id", param="body")
    if domain not in list(config.prompts.mixture):
        raise Refused(400, f"domain: it must be one of {', '.join(config.prompts.mixture)}", param="domain")
    if effort not in ["", *config.prompts.efforts]:
        raise Refused(
            400, f"effort: it must be one of {', '.join(config.prompts.efforts)}, or left out", param="effort"
        )
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise Refused(400, "id: it must be of letters, digits, _, . and -", param="id")
    return Prompt(name, domain, effort, "gateway", ())


async def keep(trajectory: Trajectory, folder: Path) -> None:
    """Named by its id, which no other session has."""
    version = max(segment.weight_version for segment in trajectory.segments)
    write_trajectories(folder / f"{trajectory.id}.safetensors", [Sampled(trajectory, version)])
