"""What every workspace does, on this machine and of a service."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import workspaces
from workspaces import PYTHON, opened

from megatron_mopd.protocols import Execution, Workspace, WorkspaceFactory, WorkspaceFailed

Body = Callable[[WorkspaceFactory], Awaitable[Any]]
Play = Callable[..., Any]

DESCRIBE = """
import os, stat
for top in ("/work", "/tmp"):
    for folder, folders, files in os.walk(top.encode()):
        folders.sort()
        for name in sorted(folders + files):
            path = os.path.join(folder, name)
            status = os.lstat(path)
            kind = stat.S_IFMT(status.st_mode)
            what = b""
            if kind == stat.S_IFLNK:
                what = os.readlink(path)
            elif kind == stat.S_IFREG:
                what = open(path, "rb").read() if status.st_mode & 0o400 else b"?"
            print(path, oct(status.st_mode), status.st_nlink, status.st_mtime_ns, what)
"""
FILL = """
import os
os.makedirs("a/b/c"); os.makedirs("/tmp/cache")
open("a/file", "w").write("content"); os.chmod("a/file", 0o640)
open("a/run.sh", "w").write("#!/bin/sh"); os.chmod("a/run.sh", 0o755)
open("a/none", "w").write("unreadable"); os.chmod("a/none", 0)
open("empty", "w"); os.utime("empty", ns=(5, 1234567890123456789))
open("/tmp/cache/x", "w").write("x" * 3000)
os.symlink("a/file", "inside"); os.symlink("/etc/shadow", "outside"); os.symlink("nowhere", "dangling")
os.symlink("../..", "a/up")
os.link("a/file", "a/b/linked")
open("a b\\nc", "w"); open(b"\\xff\\xfe", "w"); open("\\u00fc" * 100, "w"); open("-rf", "w"); open("..x", "w")
os.chmod("a/b/c", 0o500)
os.utime("a/b/c", ns=(1, -1500000000)); os.utime("inside", ns=(7, 7), follow_symlinks=False)
"""


@pytest.fixture(params=["bubblewrap", "remote"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def play(backend: str, tmp_path: Path) -> Play:
    """`play(body, **limits)` runs `await body(factory)`."""

    def play_body(body: Body, **limits: Any) -> Any:
        async def with_factory() -> Any:
            async with opened(backend, tmp_path, **limits) as factory:
                return await body(factory)

        return asyncio.run(with_factory())

    return play_body


async def shell(workspace: Workspace, script: str, **options: Any) -> Execution:
    return await workspace.run(["sh", "-c", script], **options)


async def output(workspace: Workspace, script: str) -> str:
    done = await shell(workspace, script)
    assert (done.ended, done.stderr) == (0, "")
    return done.stdout


async def described(workspace: Workspace) -> str:
    done = await workspace.run([PYTHON, "-I", "-c", DESCRIBE])
    assert (done.ended, done.stderr) == (0, "")
    return done.stdout


def test_files_stay_from_one_command_to_the_next(play: Play) -> None:
    async def body(factory: WorkspaceFactory) -> None:
        workspace = await factory.create()
        assert await output(workspace, "pwd; echo one > f; echo two > /tmp/f; mkdir d; echo three > d/f") == "/work\n"
        assert await output(workspace, "cat f /tmp/f d/f; rm f") == "one\ntwo\nthree\n"
        assert await output(workspace, "ls") == "d\n"
        other = await factory.create()
        assert await output(other, "ls; ls /tmp") == ""

    play(body)


def test_a_command_is_what_it_printed_and_how_it_ended(play: Play) -> None:
    cases = [
        (["sh", "-c", "cat; echo wrong >&2; exit 3"], Execution("in\0put", "wrong\n", 3)),
        (["sh", "-c", "kill -9 $$"], Execution("", "", 137)),
        (["sh", "-c", "printf '\\377'"], Execution("\N{REPLACEMENT CHARACTER}", "", 0)),
        (["echo", "ü\nb", "", "-n"], Execution("ü\nb  -n\n", "", 0)),
    ]

    async def body(factory: WorkspaceFactory) -> None:
        workspace = await factory.create()
        for command, expected in cases:
            assert await workspace.run(command, b"in\0put") == expected

    play(body)


def test_what_is_no_command_is_refused_and_an_absent_program_is_not_found(play: Play) -> None:
    async def body(factory: WorkspaceFactory) -> None:
        workspace = await factory.create()
        for command in ([], "ls", ["a\0b"], ["\ud800"], ["true", "x" * (1 << 22)], ["true", *["x" * 1000] * 2000]):
            assert (await workspace.run(command)).ended == "refused"
        absent = await workspace.run(["no_such_program"])
        assert absent.ended == 127
        assert "no_such_program" in absent.stderr
        assert (await workspace.run(["true"])).ended == 0

    play(body)


def test_a_command_that_takes_too_long_ends_and_its_files_stay(play: Play) -> None:
    async def body(factory: WorkspaceFactory) -> None:
        workspace = await factory.create()
        assert (await shell(workspace, "echo begun > f; sleep 60", timeout_s=1)).ended == "timeout"
        assert await output(workspace, "cat f") == "begun\n"

    play(body)


def test_background_processes_end_with_their_command(play: Play) -> None:
    async def body(factory: WorkspaceFactory) -> None:
        workspace = await factory.create()
        script = "(trap '' TERM HUP; sleep 0.3; echo late > late; sleep 60) & echo started"
        assert await output(workspace, script) == "started\n"
        assert await output(workspace, "sleep 0.6; ls; ls /proc | grep -c '^[0-9]'") < "7"

    play(body)


def test_a_snapshot_is_the_same_state_in_another_process(play: Play, backend: str, tmp_path: Path) -> None:
    async def body(factory: WorkspaceFactory) -> tuple[str, str]:
        workspace = await factory.create()
        filled = await workspace.run([PYTHON, "-I", "-c", FILL])
        assert (filled.ended, filled.stderr) == (0, "")
        before = await described(workspace)
        assert "outside" in before
        name = await workspace.snapshot()
        await output(workspace, "rm -rf a; echo changed > empty")
        await workspace.restore(name)
        assert await described(workspace) == before
        assert await workspace.snapshot() == name
        return name, before

    name, before = play(body)
    command = [sys.executable, workspaces.__file__, backend, tmp_path, name, PYTHON, "-I", "-c", DESCRIBE]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == before


def test_forks_go_their_own_ways(play: Play) -> None:
    async def body(factory: WorkspaceFactory) -> None:
        first = await factory.create()
        await output(first, "echo both > f")
        second = await first.fork()
        await output(first, "echo first > f")
        await output(second, "cat f; echo second > g")
        third = await second.fork()
        await second.close()
        assert await output(first, "cat *") == "first\n"
        assert await output(third, "cat *") == "both\nsecond\n"

    play(body)


def test_a_snapshot_that_is_not_there_changes_nothing(play: Play) -> None:
    async def body(factory: WorkspaceFactory) -> None:
        workspace = await factory.create()
        await output(workspace, "echo kept > f")
        for name in ("0" * 64, "../../etc/passwd", "", "x"):
            with pytest.raises(WorkspaceFailed, match="snapshot"):
                await workspace.restore(name)
        assert await output(workspace, "cat f") == "kept\n"

    play(body)


def test_a_closed_workspace_does_nothing_more(play: Play) -> None:
    async def body(factory: WorkspaceFactory) -> None:
        workspace = await factory.create()
        await workspace.close()
        await workspace.close()
        for call in (workspace.run(["true"]), workspace.snapshot(), workspace.restore("0" * 64), workspace.fork()):
            with pytest.raises(WorkspaceFailed, match="closed"):
                await call

    play(body)


def test_commands_of_one_workspace_wait_for_each_other_and_of_several_do_not(play: Play) -> None:
    async def body(factory: WorkspaceFactory) -> None:
        first, second = await factory.create(), await factory.create()
        script = "test ! -e busy && touch busy && sleep 0.3 && rm busy && date +%s%N"
        done = await asyncio.gather(*(shell(workspace, script) for workspace in (first, second, first, second)))
        assert [execution.ended for execution in done] == [0, 0, 0, 0]

    play(body)


def test_output_is_cut(play: Play) -> None:
    async def body(factory: WorkspaceFactory) -> None:
        done = await shell(await factory.create(), "head -c 100000 /dev/zero | tr '\\0' x; echo error >&2; exit 5")
        assert done == Execution("x" * 1000, "error\n", 5)

    play(body, output_bytes=1000)
