"""One command in a sandbox, from its start until nothing of it is left.

The kernel kills every process of a namespace with its first one, and that one ends last: when it has gone, all have.
The program can reach neither that process nor the pipe on which bubblewrap says how the program ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import signal
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megatron_mopd.protocols import WorkspaceFailed

GRACE_S = 15.0
"""How long the kernel may take to end what was killed."""
FLOOD_BYTES = 64 << 20
"""A program that prints so much is killed: reading it takes the driver's time."""
READ_BYTES = 1 << 16

CommandLine = Callable[[int, int], list[bytes | str]]
"""From the status pipe and the system call filter."""
Watch = Callable[[int], Awaitable[str]]
"""From the namespace's first process: returns with the reason why the sandbox must end, if there is one."""


class NotStarted(Exception):
    """The sandbox was not made; the message is bubblewrap's."""


@dataclass
class Output:
    """The first bytes of a stream."""

    most: int
    kept: bytearray = field(default_factory=bytearray)
    num_bytes: int = 0

    async def read(self, stream: asyncio.StreamReader, flooded: asyncio.Event) -> None:
        while block := await stream.read(READ_BYTES):
            self.num_bytes += len(block)
            self.kept += block[: self.most - len(self.kept)]
            if self.num_bytes > FLOOD_BYTES:
                flooded.set()

    def __str__(self) -> str:
        return self.kept.decode(errors="replace")


@dataclass(frozen=True)
class Ended:
    ended: int | str
    stdout: str
    stderr: str
    reason: str | None
    """Why it was killed."""


async def run_once(
    command: CommandLine,
    environment: Mapping[str, str],
    system_calls: Path,
    stdin: bytes,
    timeout_s: float,
    output_bytes: int,
    watch: Watch,
) -> Ended:
    """Raises NotStarted, and WorkspaceFailed where the kernel does not end what was killed."""
    reader, writer = os.pipe()
    try:
        with system_calls.open("rb") as rules:
            process = await asyncio.create_subprocess_exec(
                *command(writer, rules.fileno()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=[writer, rules.fileno()],
                start_new_session=True,
                env=environment,
                cwd="/",
            )
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    running = Running(process, reader, output_bytes)
    try:
        return await running.until_ended(stdin, timeout_s, watch)
    finally:
        await asyncio.shield(running.end())


class Running:
    def __init__(self, process: asyncio.subprocess.Process, status: int, output_bytes: int) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self._process, self._status, self._status_text = process, status, b""
        self._namespace: int | None = None
        self._flooded = asyncio.Event()
        self._stdout, self._stderr = Output(output_bytes), Output(output_bytes)
        self._reading = [
            asyncio.create_task(self._stdout.read(process.stdout, self._flooded)),
            asyncio.create_task(self._stderr.read(process.stderr, self._flooded)),
        ]

    async def until_ended(self, stdin: bytes, timeout_s: float, watch: Watch) -> Ended:
        feeding = asyncio.create_task(self._feed(stdin))
        ended = asyncio.create_task(self._process.wait())
        flood = asyncio.create_task(self._flooded.wait())
        watching = asyncio.create_task(self._watch(watch))
        tasks = (feeding, ended, flood, watching)
        try:
            await asyncio.wait({ended, flood, watching}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            how: int | str | None = None
            reason = None
            if not ended.done():
                how, reason = "timeout", None
                if watching.done():
                    how, reason = "killed", watching.result()
                elif flood.done():
                    how, reason = "killed", f"it printed more than {FLOOD_BYTES >> 20} MiB"
            await self.end()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return Ended(how if how is not None else self._how(), str(self._stdout), str(self._stderr), reason)

    def _how(self) -> int | str:
        """As bubblewrap says on its pipe; it says nothing where it made no sandbox, or was killed itself."""
        if code := re.search(rb'"exit-code": (\d+)', self._status_text):
            return int(code[1])
        if self._process.returncode is not None and self._process.returncode > 0:
            raise NotStarted(str(self._stderr).strip() or f"it ended with code {self._process.returncode}")
        return "killed"

    async def _feed(self, stdin: bytes) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        with suppress(BrokenPipeError, ConnectionResetError):
            pipe.write(stdin)
            await pipe.drain()
        pipe.close()

    async def _watch(self, watch: Watch) -> str:
        while not (pid := self._first_process()):
            await asyncio.sleep(0.005)
        return await watch(pid)

    def _first_process(self) -> int | None:
        """The namespace's, once bubblewrap has made it; opens it so that its number can be nobody else's."""
        self._read_status()
        if not (found := re.match(rb'\{ "child-pid": (\d+)', self._status_text)) or b"\n" not in self._status_text:
            return None
        pid = int(found[1])
        if self._namespace is None:
            namespace = json.loads(self._status_text.splitlines()[0]).get("pid-namespace")
            self._namespace = _opened(pid, namespace)
        return pid

    def _read_status(self) -> None:
        while select.select([self._status], [], [], 0)[0] and (block := os.read(self._status, 4096)):
            self._status_text += block

    async def end(self) -> None:
        """Kill what is left, and wait until nothing is."""
        if self._status < 0:
            return
        self._first_process()
        if self._namespace is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._namespace, signal.SIGKILL)
            await self._wait_for_namespace()
        with suppress(ProcessLookupError):  # bubblewrap itself, which may be about to make the namespace
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            await asyncio.wait_for(asyncio.gather(self._process.wait(), *self._reading), GRACE_S)
        except TimeoutError:
            raise WorkspaceFailed(f"what it started did not end within {GRACE_S:g} s of being killed") from None
        self._read_status()
        os.close(self._status)
        self._status = -1

    async def _wait_for_namespace(self) -> None:
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        namespace, self._namespace = self._namespace, None
        assert namespace is not None
        loop.add_reader(namespace, gone.set)
        try:
            await asyncio.wait_for(gone.wait(), GRACE_S)
        except TimeoutError:
            raise WorkspaceFailed(f"its programs did not end within {GRACE_S:g} s of being killed") from None
        finally:
            loop.remove_reader(namespace)
            os.close(namespace)


def _opened(pid: int, namespace: int) -> int | None:
    """A handle on the process, unless it has ended: its number may be another one's by now."""
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return None
    with suppress(OSError):
        if os.stat(f"/proc/{pid}/ns/pid").st_ino == namespace:
            return process
    os.close(process)
    return None
