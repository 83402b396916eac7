"""Workspaces on this machine: each command in a new bubblewrap sandbox over the same two folders, /work and /tmp.

State is files: nothing runs on between commands, a command's background processes end with it. So a snapshot is an
archive of the two folders (archive.py), and a driver that starts again finds in it all that there was.

What a program sees and may do is in bubblewrap_command.py, seccomp.py and limits.py. The kernel holds each limit but
those on the sum of memory and of files, which are watched (watch.py): it takes no quota, no control group and no root.

Promises (tests/contract/test_workspace.py, tests/unit/test_sandbox_escapes.py): nothing that a program does raises, is
seen outside its workspace, or is left; the folder of a dead driver's workspaces is emptied by the next one.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from megatron_mopd.errors import UserError
from megatron_mopd.protocols import Execution, WorkspaceFailed
from megatron_mopd.sandbox.archive import pack, unpack
from megatron_mopd.sandbox.bubblewrap_command import STAGE, Bubblewrap, find_program, write_etc
from megatron_mopd.sandbox.bubblewrap_run import Ended, NotStarted, run_once
from megatron_mopd.sandbox.limits import Limits
from megatron_mopd.sandbox.live import STATE_FOLDERS, Live, opened_state, remove
from megatron_mopd.sandbox.seccomp import system_call_filter
from megatron_mopd.sandbox.snapshots import Snapshots
from megatron_mopd.sandbox.tree import NOTHING, Usage, opened_folder
from megatron_mopd.sandbox.watch import taken
from megatron_mopd.sandbox.words import encoded

TRIES, PAUSE_S = 3, 0.3
"""Of starting a sandbox, where the machine is short of something."""
WATCH_S = 0.05
WATCH_SHARE = 0.1
"""Most of one core that watching a command takes."""
NOBODY = 65534
Result = TypeVar("Result")


class BubblewrapWorkspaces:
    def __init__(
        self,
        folder: str | Path,
        *,
        read_only: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        user: int = NOBODY,
        max_running: int | None = None,
        **limits: Any,
    ) -> None:
        """Args:
        folder: of live workspaces and of snapshots, which later processes find there.
        read_only: further folders and files that programs see under their own names.
        environment: further variables of programs.
        user: a number, who programs are outside where the driver is root.
        max_running: commands at once; None: one for each core.
        limits: see limits.Limits.
        """
        try:
            self.limits = Limits(**limits)
        except TypeError as error:
            raise UserError(f"workspaces: {str(error).removeprefix('Limits.__init__() ')}") from None
        self._folder = Path(folder).absolute()
        shown = [Path(name) for name in read_only]
        if wrong := [str(path) for path in shown if not path.is_absolute() or not path.exists() or path == Path("/")]:
            raise UserError(f"workspaces: read_only names {wrong[0]}, which must be an absolute path of this machine")
        self.owner = user if os.geteuid() == 0 else None
        if self.owner and any(path.is_relative_to(STAGE) for path in (self._folder.resolve(), *shown)):
            raise UserError(f"workspaces: folder and read_only may not be below {STAGE} where the driver is root")
        if not isinstance(user, int) or user < 1:
            raise UserError(f"workspaces: user={user!r} must be the number of a user that is not root")
        program, rules = find_program(), system_call_filter()
        self.snapshots = Snapshots(self._folder / "snapshots", self.limits)
        self._live = Live(self._folder / "live")
        etc, self.system_calls = self._live.folder / "etc", self._live.folder / "system_calls"
        self.environment = self._live.environment
        write_etc(etc)
        self.system_calls.write_bytes(rules)
        self.bubblewrap = Bubblewrap(program, etc, self.limits, shown, environment or {}, self.owner)
        cores = os.cpu_count() or 1
        self.running = asyncio.Semaphore(max_running or cores)
        self._threads = ThreadPoolExecutor(cores, thread_name_prefix="workspace")
        self._workspaces: set[BubblewrapWorkspace] = set()
        self._works = False

    async def create(self) -> BubblewrapWorkspace:
        workspace = BubblewrapWorkspace(self, await self.in_thread(self._live.new, self.owner))
        self._workspaces.add(workspace)
        if not self._works:
            await self._try_out(workspace)
        return workspace

    async def _try_out(self, workspace: BubblewrapWorkspace) -> None:
        try:
            await workspace.run(["true"])
        except WorkspaceFailed as error:
            await workspace.close()
            raise UserError(
                f"workspaces: bubblewrap makes no sandbox here: {error}. Let this user make namespaces: "
                "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0, and in a "
                "container a seccomp profile that allows unshare and mount"
            ) from None
        self._works = True

    async def close(self) -> None:
        for workspace in tuple(self._workspaces):
            await workspace.close()
        self._threads.shutdown()
        self._live.remove()

    def keep_only(self, names: Collection[str]) -> None:
        """Remove all snapshots but these: those that a checkpoint or a token log names."""
        self.snapshots.keep_only(names)

    def forget(self, workspace: BubblewrapWorkspace) -> None:
        self._workspaces.discard(workspace)

    async def in_thread(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Its result; whoever is cancelled meanwhile waits for it all the same, for it works on the state."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise


class BubblewrapWorkspace:
    def __init__(self, factory: BubblewrapWorkspaces, folder: Path) -> None:
        self._factory, self._folder = factory, folder
        self._lock = asyncio.Lock()
        self._usage, self._measured_s = NOTHING, time.monotonic()
        self._failed: str | None = None
        self._closed = False

    async def run(self, command: Sequence[str], stdin: bytes = b"", timeout_s: float | None = None) -> Execution:
        try:
            words = encoded(command)
        except ValueError as error:
            return Execution("", f"workspace: {error}", "refused")
        limit_s = self._factory.limits.timeout_s
        async with self._lock, self._factory.running:
            self._check_open()
            if self._failed:
                return Execution("", f"workspace: {self._failed}", "killed")
            ended = await self._started(words, stdin, limit_s if timeout_s is None else min(timeout_s, limit_s))
            if time.monotonic() - self._measured_s > 1.0 or ended.reason:
                await self._taken()
        if ended.reason is None:
            return Execution(ended.stdout, ended.stderr, ended.ended)
        return Execution(ended.stdout, f"{ended.stderr}\nworkspace: {ended.reason}", ended.ended)

    async def _started(self, words: Sequence[bytes], stdin: bytes, timeout_s: float) -> Ended:
        reason = ""
        limits, bubblewrap = self._factory.limits, self._factory.bubblewrap
        for number in range(TRIES):
            await asyncio.sleep(number * PAUSE_S)
            try:
                return await run_once(
                    lambda status, rules: bubblewrap.command(self._state, status, rules, words),
                    self._factory.environment,
                    self._factory.system_calls,
                    stdin,
                    timeout_s,
                    limits.output_bytes,
                    self._watch,
                )
            except NotStarted as error:
                reason = str(error)
            except OSError as error:  # no process, no memory
                reason = f"{error.strerror or error}"
        raise WorkspaceFailed(f"a sandbox could not be started in {TRIES} tries: {reason}")

    async def _watch(self, init_pid: int) -> str:
        pause_s = WATCH_S / 2
        while True:
            await asyncio.sleep(pause_s)
            start = time.monotonic()
            if reason := await self._taken(init_pid):
                return reason
            pause_s = max(WATCH_S, (time.monotonic() - start) / WATCH_SHARE)

    async def _taken(self, init_pid: int | None = None) -> str | None:
        """Why the sandbox must end. If programs went on growing its files, or nobody can walk them, it has failed."""
        over, self._usage, self._failed = await self._factory.in_thread(self._take, init_pid)
        self._measured_s = time.monotonic()
        return over or self._failed

    def _take(self, init_pid: int | None) -> tuple[str | None, Usage, str | None]:
        with opened_state(self._state) as state:
            return taken(state, init_pid, self._factory.limits, self._usage)

    async def snapshot(self) -> str:
        async with self._lock:
            self._check_whole()
            return await self._factory.in_thread(self._save)

    def _save(self) -> str:
        with opened_state(self._state) as state:
            return self._factory.snapshots.save(state)

    async def restore(self, name: str) -> None:
        async with self._lock:
            self._check_open()
            await self._factory.in_thread(self._replace, lambda: self._factory.snapshots.open(name))
            self._failed, self._usage = None, NOTHING

    async def fork(self) -> BubblewrapWorkspace:
        async with self._lock:
            self._check_whole()
            other = await self._factory.create()
            try:
                await self._factory.in_thread(other._replace, self._copied)
            except BaseException:
                await other.close()
                raise
        return other

    def _copied(self) -> BinaryIO:
        archive = self._factory.snapshots.scratch()
        try:
            with opened_state(self._state) as state:
                pack(state, archive, self._factory.limits)
        except BaseException:
            archive.close()
            raise
        archive.seek(0)
        return archive

    def _replace(self, opened: Callable[[], BinaryIO]) -> None:
        """The state is the old one until the new one is whole."""
        new, old = self._folder / "new", self._folder / "old"
        with opened() as archive:
            new.mkdir(mode=0o700)
            try:
                with opened_state(new) as state:
                    unpack(archive, state, self._factory.limits, self._factory.owner)
                    if sorted(os.listdir(state)) != sorted(STATE_FOLDERS):
                        raise WorkspaceFailed("the archive is none of a workspace: it needs the folders work and tmp")
                    for name in STATE_FOLDERS:  # raises for what is no folder
                        with opened_folder(name, state):
                            pass
            except BaseException:
                remove(new)
                raise
        self._state.rename(old)
        new.rename(self._state)
        remove(old)

    async def close(self) -> None:
        async with self._lock:
            if not self._closed:
                self._closed = True
                await self._factory.in_thread(remove, self._folder)
                self._factory.forget(self)

    @property
    def _state(self) -> Path:
        return self._folder / "state"

    def _check_open(self) -> None:
        if self._closed:
            raise WorkspaceFailed("it was closed")

    def _check_whole(self) -> None:
        self._check_open()
        if self._failed:
            raise WorkspaceFailed(self._failed)
