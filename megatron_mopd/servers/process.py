"""One server process: a port that stays its own, a start, an end that leaves nothing behind.

The port is bound by the keeper and never listened on. The server may bind it too (both sockets have SO_REUSEADDR, and
one that does not listen is no conflict), while the kernel gives it to nobody else as long as it is bound: also not
between the death of a server and its next start.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from pathlib import Path

from megatron_mopd.servers.addresses import reserve_port, url_of
from megatron_mopd.servers.spec import ServerSpec

CHILD = Path(__file__).with_name("child.py")
USAGE_ERROR = 2
"""Exit code of a server that does not understand its arguments."""
KILLED = 137
LAST_LINES = 10
_ERROR = re.compile(r"^([\w. ]*: error: .*|[\w.]*(Error|Exception): .+)")


class ServerProcess:
    """`url` and the log file are known before the first start and never change."""

    def __init__(self, spec: ServerSpec, logs: Path):
        self.name, self.spec, self.log = spec.name, spec, logs / spec.log
        self._port = reserve_port(spec.host, spec.table)
        self.url = url_of(spec.host, self._port.getsockname()[1])
        self._process: subprocess.Popen | None = None

    @property
    def pid(self) -> int | None:
        """Leader of the server's process group."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        assert self._process is None, f"{self.name} runs already"
        spec, port = self.spec, self._port.getsockname()[1]
        self._lifeline, theirs = socket.socketpair()
        key_variable = spec.key_variable if spec.takes_key_as_argument else None
        words = [str(spec.python), str(CHILD), str(theirs.fileno()), str(spec.grace_s), key_variable or "", spec.module]
        words += spec.command(port)
        with os.fdopen(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                words,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=spec.environment(),
                start_new_session=True,
            )
        theirs.close()

    def ask_to_end(self) -> None:
        self._lifeline.shutdown(socket.SHUT_WR)

    def ended(self) -> bool:
        """Whether its leader has ended; it is not yet reaped, so that its group's id is still its own."""
        assert self._process is not None
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def end(self) -> int:
        """Kill what is left of the group; return the exit code of the server."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        said = self._lifeline.recv(16)
        self._lifeline.close()
        self._process = None
        return int(said) if said.isdigit() else KILLED

    def reason(self, code: int | None) -> str:
        """Why it ended: the error among its last lines if there is one (earlier ones it has survived), the signal that
        ended it, or its last line."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        if errors := [line for line in lines[-LAST_LINES:] if _ERROR.match(line)]:
            return errors[-1]
        if code is not None and code > 128:
            return signal.Signals(code - 128).name
        return lines[-1] if lines else "it ended without a word"

    def release(self) -> None:
        self._port.close()
