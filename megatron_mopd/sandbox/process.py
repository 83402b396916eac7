"""A sandbox of subprocesses on this machine, for Python programs.

Each run has a folder of its own that is removed, no environment variables, limits on CPU, memory, file size and open
files, a wall-clock limit, and, where the kernel grants it, no network and no process that outlives it (child.py).

Promises (tests/unit/test_sandbox.py): a program's fault is an Execution and never an exception; nothing that it started
is left; what it prints is cut at `output_bytes`; where there are no namespaces, a line on stderr says so. It is no wall
against an attacker: programs read what the user can read. Where that matters, run the driver in a container.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from megatron_mopd.errors import UserError
from megatron_mopd.protocols import Execution

CHILD = Path(__file__).with_name("child.py")
GRACE_S = 5.0
"""How long the child's parent may take beyond the time-out that it enforces."""


class ProcessSandbox:
    def __init__(
        self,
        *,
        timeout_s: int = 5,
        cpu_s: int = 5,
        memory_mb: int = 512,
        output_bytes: int = 1 << 16,
        max_processes: int = 4,
    ) -> None:
        """Args:
        timeout_s, cpu_s: wall-clock and CPU limit of a program.
        memory_mb: of its address space.
        output_bytes: most bytes of any file that it writes, its output included.
        max_processes: programs that run at once.
        """
        limits = (timeout_s, cpu_s, memory_mb, output_bytes, max_processes)
        names = ("timeout_s", "cpu_s", "memory_mb", "output_bytes", "max_processes")
        for name, value in zip(names, limits, strict=True):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"sandbox: {name}={value!r} must be a whole number of at least 1")
        self._timeout_s, self._cpu_s, self._output_bytes = timeout_s, cpu_s, output_bytes
        self._memory_bytes = memory_mb << 20
        self._has_said = False
        self._threads = ThreadPoolExecutor(max_processes, thread_name_prefix="sandbox")

    async def run(self, program: str, stdin: str) -> Execution:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.run_blocking, program, stdin)

    @cached_property
    def is_isolated(self) -> bool:
        """Whether this machine's kernel gives its programs namespaces of their own: no network."""
        return self._run("", "")[1]

    def run_blocking(self, program: str, stdin: str) -> Execution:
        return self._run(program, stdin)[0]

    def _run(self, program: str, stdin: str) -> tuple[Execution, bool]:
        with tempfile.TemporaryDirectory(prefix="mopd_sandbox_", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            try:
                (folder / "program.py").write_text(program, encoding="utf-8")
                (folder / "stdin").write_text(stdin, encoding="utf-8")
            except UnicodeEncodeError as error:  # half of a surrogate pair
                return Execution("", f"not a text: {error}", "refused"), False
            ended, isolated = self._execute(folder)
            if not isolated:
                self._say_once()
            out, err = (self._read(folder / stream) for stream in ("stdout", "stderr"))
        return Execution(out, err, ended), isolated

    def _say_once(self) -> None:
        if not self._has_said:
            self._has_said = True
            print(
                "sandbox: the kernel gives this user no namespaces; sandboxed programs have this machine's network",
                file=sys.stderr,
                flush=True,
            )

    def _execute(self, folder: Path) -> tuple[int | str, bool]:
        status, status_end = os.pipe()
        with open(status, "rb") as reader:
            try:
                process = self._start(folder, status_end)
            finally:
                os.close(status_end)
            try:
                process.wait(self._timeout_s + GRACE_S)
            except subprocess.TimeoutExpired:
                return "timeout", True  # nothing is known of its namespaces
            finally:
                _kill_group(process)
            words = reader.read().decode().split()
        if len(words) != 2:
            error = self._read(folder / "stderr")
            raise UserError(f"sandbox: its process ended with code {process.returncode}: {error}")
        ended, isolated = words
        return int(ended) if ended.isdigit() else ended, isolated == "1"

    def _start(self, folder: Path, status_end: int) -> subprocess.Popen[bytes]:
        limits = (status_end, self._timeout_s, self._cpu_s, self._memory_bytes, self._output_bytes)
        with (
            (folder / "stdin").open("rb") as stdin,
            (folder / "stdout").open("wb") as stdout,
            (folder / "stderr").open("wb") as stderr,
        ):
            return subprocess.Popen(
                [sys.executable, "-I", "-S", str(CHILD), *map(str, limits), sys.executable, "-I", "program.py"],
                cwd=folder,
                env={"PATH": os.defpath},
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=[status_end],
                start_new_session=True,
            )

    def _read(self, file: Path) -> str:
        with file.open("rb") as stream:
            return stream.read(self._output_bytes).decode(errors="replace")


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """What is left of its session; without namespaces that may be children of the program."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
