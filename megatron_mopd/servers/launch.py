"""What the rest of the project needs of servers that it starts: `servers` around a run, `endpoints` to reach them.

The work is the keeper's, a process of its own (`keeper.py`), so that no end of the trainer leaves a server behind.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_mopd.config import Config
from megatron_mopd.errors import UserError
from megatron_mopd.link import environment_without_torchrun
from megatron_mopd.servers import files
from megatron_mopd.servers.keeper import PREVIOUS_KEEPER_S, READY
from megatron_mopd.servers.spec import ServerSpec
from megatron_mopd.servers.wanted import check_servers, server_specs

MARGIN_S = 15.0


@contextmanager
def servers(config: Config) -> Iterator[None]:
    """Keep the servers of `config` as long as the context lasts: none, if it needs none; those of a `mopd serve`, if
    one is at work in the run folder.

    Enters as soon as their URLs are known; they come up later. Raises UserError for what can be refused at once.
    """
    check_servers(config)
    specs = server_specs(config)
    if files.is_served(config.run.folder):
        _check_served(config.run.folder, specs)
        yield
        return
    if not specs:
        yield
        return
    log = config.run.folder / "logs" / "keeper.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    ours, theirs = socket.socketpair()
    with ours, log.open("ab") as output:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "megatron_mopd.servers.keeper", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment_without_torchrun(),
            start_new_session=True,  # Ctrl-C reaches the trainer, which then hangs up
        )
        theirs.close()
        try:
            ours.sendall(config.model_dump_json().encode() + b"\n")
            ours.settimeout(PREVIOUS_KEEPER_S + MARGIN_S)
            if ours.recv(len(READY)) != READY:
                raise UserError(_last_line(log))
            yield
        finally:
            ours.close()
            _wait(keeper, max(spec.grace_s for spec in specs) + MARGIN_S)


def _check_served(run_folder: Path, specs: list[ServerSpec]) -> None:
    if missing := {spec.name for spec in specs} - files.read_endpoints(run_folder).keys():
        raise UserError(
            f"`mopd serve` keeps servers in {run_folder}, but no {sorted(missing)[0]}; start it with the configuration "
            "of the run"
        )


def endpoints(run_folder: Path) -> dict[str, str]:
    """Server name to URL, of the servers that are started for this run. Raises UserError where their keeper is gone."""
    check_keeper(run_folder)
    return files.read_endpoints(run_folder)


def check_keeper(run_folder: Path) -> None:
    """Raise UserError with the keeper's reason once it has given up: then no server comes back."""
    failure = files.folder(run_folder) / files.FAILURE
    if failure.exists():
        raise UserError(failure.read_text())
    if not files.keeper_lives(run_folder):
        raise UserError(
            f"the keeper of the servers has ended; see {run_folder}/logs/keeper.log, or what `mopd serve` said if it "
            "was that"
        )


def _wait(keeper: subprocess.Popen, timeout_s: float) -> None:
    """It has been hung up on: it ends its servers, and then itself."""
    try:
        keeper.wait(timeout_s)
    except subprocess.TimeoutExpired:
        keeper.kill()  # its servers end with it
        keeper.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() or ["the keeper of the servers did not start"]
    return lines[-1].removeprefix("mopd: error: ")
