"""The keeper: starts the servers of a configuration, starts dead ones again, and ends them all on every way out.

A process of its own, started by rank 0 (`launch.servers`) or by hand (`mopd serve CONFIG`). It ends by SIGTERM or
SIGINT, with its parent (whose end of a socket closes), or when a server cannot be kept alive: then the reason is the
last line that it prints, and in RUN/endpoints/failure.txt. Killed outright, its servers still end, see `child.py`.

Promises: URLs do not change over restarts; RUN/endpoints/<name>.json is there from before the first start until the
end; on a CPU one server starts at a time, whatever keepers are at work on the machine.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from megatron_mopd.cli import guarded
from megatron_mopd.client import Client
from megatron_mopd.config import Config
from megatron_mopd.errors import UserError
from megatron_mopd.protocols import EndpointDown
from megatron_mopd.run_lock import locked, try_lock
from megatron_mopd.servers import files
from megatron_mopd.servers.process import USAGE_ERROR, ServerProcess
from megatron_mopd.servers.wanted import check_servers, server_specs

MAX_DEATHS = 5
"""In a row, none after a healthy minute."""
MAX_FIRST_DEATHS = 2
"""Of a server that has never been healthy: the second try is for a port of SGLang's own choice that was taken."""
HEALTHY_S = 60.0
CHECK_S = 0.25
MARGIN_S = 5.0
READY = b"ready\n"
PREVIOUS_KEEPER_S = 60.0
"""How long the keeper of a run that was killed a moment ago may take to end its servers."""

Say = Callable[[str], None]


class Keeper:
    def __init__(self, run_folder: Path, servers: list[ServerProcess], say: Say):
        self._run_folder, self._servers, self._say = run_folder, servers, say

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the servers until `stop`. Raises UserError where one of them cannot be kept."""
        tasks = [asyncio.create_task(self._keep(server)) for server in self._servers]
        waiting = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (waiting, *tasks):
                task.cancel()
            await asyncio.gather(waiting, *tasks, return_exceptions=True)
            await asyncio.gather(*(self._end(server) for server in self._servers))

    async def _keep(self, server: ServerProcess) -> None:
        deaths, tries = 0, MAX_FIRST_DEATHS
        while True:
            healthy_from = await self._start(server)
            if healthy_from is not None:
                tries = MAX_DEATHS
                while not server.ended():
                    await asyncio.sleep(CHECK_S)
                deaths = 0 if time.monotonic() - healthy_from > HEALTHY_S else deaths
            deaths += 1
            code = await self._end(server)
            if code == USAGE_ERROR and tries == MAX_FIRST_DEATHS:
                raise UserError(f"{server.spec.table}: {server.name} refuses its arguments: {server.reason(code)}")
            reason = f"{server.name} ended with exit code {code}: {server.reason(code)}"
            if deaths == tries:
                raise UserError(f"{reason}; given up after {deaths} starts, see {server.log}")
            self._say(f"{reason}; starting it again")
            await asyncio.sleep(2.0 ** (deaths - 1))

    async def _start(self, server: ServerProcess) -> float | None:
        """Return once it is healthy, with the time; None where it ends first, or is not there in time."""
        waits = (
            f"{server.name} waits: another run is starting a server on this machine, and on a CPU one starts at a time"
        )
        async with _turn(server.spec.on_cpu, lambda: self._say(waits)):
            started = time.monotonic()
            server.start()
            files.write_endpoint(self._run_folder, server.name, server.url, server.pid)
            if not await self._becomes_healthy(server):
                return None
        self._say(f"{server.name} serves at {server.url}, {time.monotonic() - started:.0f} s after its start")
        return time.monotonic()

    async def _end(self, server: ServerProcess) -> int | None:
        """In order if it does so in time; None where it does not run."""
        if server.pid is None:
            return None
        server.ask_to_end()
        deadline = time.monotonic() + server.spec.grace_s + MARGIN_S
        while not server.ended() and time.monotonic() < deadline:
            await asyncio.sleep(CHECK_S)
        return server.end()

    async def _becomes_healthy(self, server: ServerProcess) -> bool:
        deadline = time.monotonic() + server.spec.start_timeout_s
        async with Client(silence_s=10.0, api_key=server.spec.key) as client:
            while not server.ended():
                if time.monotonic() > deadline:
                    self._say(f"{server.name} is not healthy after {server.spec.table}.start_timeout_s; ending it")
                    return False
                try:
                    await client.get(server.url, "/ready")
                except EndpointDown:
                    await asyncio.sleep(CHECK_S)
                else:
                    return True
        return False


@asynccontextmanager
async def _turn(on_cpu: bool, say_that_it_waits: Callable[[], None]) -> AsyncIterator[None]:
    """Cores are shared: two servers that start together take more than twice as long, and may look dead."""
    if not on_cpu:
        yield
        return
    path = Path(tempfile.gettempdir()) / f"megatron_mopd-{os.getuid()}-server-start.lock"
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)) as file:
        said = False
        while not try_lock(file.fileno()):
            if not said:
                say_that_it_waits()
            said = True
            await asyncio.sleep(CHECK_S)
        yield


@contextmanager
def reserved_servers(config: Config, foreground: bool) -> Iterator[list[ServerProcess]]:
    """The servers with their ports, announced in RUN/endpoints as long as the context lasts."""
    folder = config.run.folder
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with locked(files.folder(folder), wait_s=PREVIOUS_KEEPER_S):
        files.clear(folder)
        servers = [ServerProcess(spec, logs) for spec in server_specs(config)]
        files.write_config(folder, config.dump())
        try:
            for server in servers:
                files.write_endpoint(folder, server.name, server.url, None)
            if foreground:
                files.mark_foreground(folder)
            yield servers
        except UserError as error:
            files.clear(folder)
            files.write_failure(folder, str(error))
            raise
        else:
            files.clear(folder)
        finally:
            for server in servers:
                server.release()


def serve(config: Config) -> int:
    """`mopd serve`: the keeper in the foreground, until Ctrl-C."""
    check_servers(config)
    if not server_specs(config):
        raise UserError(
            "nothing to serve: set rollout.engine=sglang, or teachers.backend to sglang or megatron, and no URLs"
        )
    with reserved_servers(config, foreground=True) as servers:
        return asyncio.run(_run(config, servers, lambda line: print(line, flush=True), parent=None))


async def _run(config: Config, servers: list[ServerProcess], say: Say, parent: socket.socket | None) -> int:
    """Keep until a signal, or until the parent hangs up. Return the exit code."""
    stop, code = asyncio.Event(), 0
    loop = asyncio.get_running_loop()

    def by_signal(number: int) -> None:
        nonlocal code
        code = 128 + number
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, by_signal, number)
    if parent is not None:
        loop.add_reader(parent, stop.set)
    await Keeper(config.run.folder, servers, say).run(stop)
    return code


def main() -> None:
    """`python -m megatron_mopd.servers.keeper SOCKET_FD`: started by `launch.servers`, which sends the configuration
    and hears when the URLs are announced."""
    parent = socket.socket(fileno=int(sys.argv[1]))

    def command() -> int:
        with parent.makefile("rb") as lines:
            config = Config.model_validate_json(lines.readline())
        with reserved_servers(config, foreground=False) as servers:
            parent.sendall(READY)
            return asyncio.run(_run(config, servers, _log, parent))

    sys.exit(guarded(command))


def _log(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
