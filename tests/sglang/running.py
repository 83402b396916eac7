"""Servers that run, as the tests of this folder see them; the fixtures of conftest.py start them."""

from __future__ import annotations

import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from megatron_mopd.config import Config
from megatron_mopd.servers import files
from megatron_mopd.servers.launch import check_keeper

WAIT_S = 400.0
"""For a server, with the starts of others before it: one at a time on a machine."""


@dataclass(frozen=True)
class Servers:
    """Servers that a keeper keeps for the run in `config.run.folder`."""

    config: Config
    urls: Mapping[str, str]

    def pid(self, name: str) -> int | None:
        """Leader of the server's process group."""
        return files.read_endpoint(self.config.run.folder, name)["pid"]

    def kill(self, name: str) -> None:
        pid = self.pid(name)
        assert pid is not None, f"{name} has not been started"
        os.killpg(pid, signal.SIGKILL)

    def wait_healthy(self, name: str, timeout_s: float = WAIT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_ready(self.urls[name]):
            check_keeper(self.config.run.folder)
            assert time.monotonic() < deadline, f"{name} is not healthy after {timeout_s} s"
            time.sleep(0.2)


@dataclass(frozen=True)
class Server:
    """The server of the session. A test leaves it with the weights of `checkpoint`."""

    url: str
    checkpoint: Path
    config: Config


StartServers = Callable[..., AbstractContextManager[Servers]]


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=10) as reply:
            return reply.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
