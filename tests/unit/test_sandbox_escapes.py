"""Ways out of a workspace that programs may try: each must fail, and this process must be none the worse.

Every program here is bounded by itself too: were there no sandbox, it would take a few seconds and some memory.
"""

from __future__ import annotations

import asyncio
import io
import os
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from workspaces import PYTHON, local

from megatron_mopd.errors import UserError
from megatron_mopd.protocols import Execution, WorkspaceFailed
from megatron_mopd.sandbox import bubblewrap_command, bubblewrap_run
from megatron_mopd.sandbox.archive import unpack
from megatron_mopd.sandbox.bubblewrap import BubblewrapWorkspace, BubblewrapWorkspaces
from megatron_mopd.sandbox.limits import Limits
from megatron_mopd.sandbox.live import remove
from megatron_mopd.sandbox.seccomp import system_call_filter

Body = Callable[[BubblewrapWorkspace], Awaitable[Any]]
TRY = """
import sys
def attempt(name, function):
    try:
        result = function()
    except BaseException as error:
        print(name, "failed:", type(error).__name__, getattr(error, "errno", ""))
    else:
        print(name, "ESCAPED", result)
"""


def play(folder: Path, body: Body, **limits: Any) -> Any:
    async def with_workspace() -> Any:
        factory = local(folder, **limits)
        try:
            return await body(await factory.create())
        finally:
            await factory.close()
            assert sorted(path.name for path in (folder / "live").iterdir()) == ["lock"]

    return asyncio.run(with_workspace())


def python(folder: Path, program: str, timeout_s: float | None = None, **limits: Any) -> Execution:
    async def body(workspace: BubblewrapWorkspace) -> Execution:
        done = await workspace.run([PYTHON, "-I", "-c", TRY + program], timeout_s=timeout_s)
        assert (await workspace.run(["echo", "alive"])).stdout == "alive\n" or workspace._failed
        return done

    return play(folder, body, **limits)


def attempts(folder: Path, program: str, count: int, **limits: Any) -> str:
    """What a program printed whose attempts have all failed."""
    done = python(folder, program, **limits)
    assert (done.ended, done.stderr) == (0, "")
    assert done.stdout.count(" failed: ") == count, done.stdout
    assert "ESCAPED" not in done.stdout
    return done.stdout


@pytest.fixture
def listening() -> Iterator[tuple[int, str, list[bytes]]]:
    """A TCP port, the name of an abstract UNIX socket and what arrived at either."""
    name = f"\0mopd-escape-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(name)
        unix.listen()
        arrived: list[bytes] = []
        yield tcp.getsockname()[1], name, arrived
        for server in (tcp, unix):
            server.settimeout(0.05)
            with pytest.raises(TimeoutError):
                server.accept()


def test_there_is_no_network(tmp_path: Path, listening: tuple[int, str, list[bytes]]) -> None:
    port, name, _ = listening
    program = f"""
import socket, os
attempt("tcp", lambda: socket.create_connection(("127.0.0.1", {port}), 2))
attempt("abstract", lambda: socket.socket(socket.AF_UNIX).connect({name!r}))
for family in ("AF_VSOCK", "AF_PACKET", "AF_NETLINK", "AF_ALG"):
    attempt(family, lambda: socket.socket(getattr(socket, family), socket.SOCK_RAW))
attempt("resolver", lambda: open("/etc/resolv.conf"))
attempt("interfaces", lambda: os.listdir("/sys/class/net"))
print(open("/proc/net/dev").read().count(":"), "interface")
"""
    assert "1 interface" in attempts(tmp_path, program, 8)  # its own loopback


def test_there_is_only_the_workspace_to_write_to(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    program = f"""
import os
for path in ("/", "/usr", "/usr/bin", "/etc", "/dev", "/proc/1", "/lib", {sys.base_prefix!r}, {str(tmp_path)!r}):
    attempt(path, lambda: open(path + "/planted", "w"))
attempt("replace", lambda: open("/etc/passwd", "a"))
attempt("target", lambda: open({str(target)!r}, "w"))
attempt("sysctl", lambda: open("/proc/sys/kernel/hostname", "w").write("x"))
attempt("sysrq", lambda: open("/proc/sysrq-trigger", "w").write("x"))
attempt("core", lambda: open("/proc/sys/kernel/core_pattern", "w").write("|/work/x"))
attempt("remount", lambda: __import__("subprocess").run(["mount", "-o", "remount,rw", "/"], check=True, stderr=-3))
attempt("device", lambda: os.mknod("/work/sda", 0o60666, os.makedev(254, 0)))
attempt("device", lambda: os.mknod("/work/mem", 0o20666, os.makedev(1, 1)))
"""
    attempts(tmp_path, program, 17)
    assert target.read_text() == "mine"


def test_nothing_of_the_machine_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOPD_ESCAPE_SECRET", "s3cret-of-the-driver")
    secret = tmp_path / "secret"
    secret.write_text("s3cret-of-the-run")
    home = str(Path.home())
    program = f"""
import os, glob
attempt("run", lambda: open({str(secret)!r}).read())
attempt("shadow", lambda: open("/etc/shadow").read())
attempt("home", lambda: os.listdir({home!r} + "/.ssh"))
attempt("code", lambda: open({bubblewrap_run.__file__!r}).read())
attempt("memory", lambda: open("/dev/mem", "rb").read(1))
attempt("kernel", lambda: open("/proc/kcore", "rb").read(1))
attempt("disk", lambda: open("/dev/vda", "rb").read(1))
attempt("hosts", lambda: [line for line in open("/etc/passwd") if "agent" not in line and "nobody" not in line][0])
attempt("root of another", lambda: os.listdir("/proc/1/root"))
print(dict(os.environ), sorted(n for n in os.listdir("/proc") if n.isdigit()))
print([open(p, "rb").read() for p in glob.glob("/proc/[0-9]*/environ") if p != "/proc/1/environ"])
print("fds", sorted(os.listdir("/proc/self/fd")))
"""
    text = attempts(tmp_path, program, 9)
    assert "s3cret" not in text
    assert str(os.getpid()) not in text.splitlines()[-3].partition("[")[2]
    assert "fds ['0', '1', '2', '3']" in text  # 3 lists the folder


def test_no_signal_and_no_hand_reaches_another_process(tmp_path: Path) -> None:
    mine = os.getpid()
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
    program = f"""
import ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    if getattr(libc, name)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), name)
attempt("signal", lambda: os.kill({mine}, signal.SIGUSR1))
attempt("group", lambda: os.killpg({os.getpgid(0)}, signal.SIGUSR1))
attempt("ptrace", lambda: call("ptrace", 16, {mine}, 0, 0))
attempt("ptrace parent", lambda: call("ptrace", 16, os.getppid(), 0, 0))
attempt("memory", lambda: open("/proc/{mine}/mem", "r+b"))
attempt("memory of init", lambda: open("/proc/1/mem", "r+b"))
attempt("memory of init's thread", lambda: open("/proc/1/task/1/mem", "r+b"))
attempt("pidfd", lambda: os.pidfd_open({mine}))
attempt("setns", lambda: call("setns", os.open("/proc/self/ns/net", 0), 0))
attempt("unshare", lambda: call("unshare", 0x10000000))
attempt("clone", lambda: call("syscall", 56, 0x10000000 | 17, 0, 0, 0, 0))
attempt("shm", lambda: call("shmget", 0, 1 << 20, 0o1600))
attempt("keyring", lambda: call("syscall", 250, 0, -3, 1))
attempt("io_uring", lambda: call("syscall", 425, 1, 0))
attempt("bpf", lambda: call("syscall", 321, 0, 0, 0))
attempt("setuid", lambda: os.setuid(0))
attempt("priority", lambda: os.nice(-5))
attempt("chroot", lambda: os.chroot("/work"))
attempt("tty", lambda: open("/dev/tty"))
os.kill(1, signal.SIGKILL)
print("init lives")
sys.stdout.flush()
try:
    os.kill(-1, signal.SIGUSR1)
except ProcessLookupError:
    print("nobody else")
"""
    try:
        done = python(tmp_path, program)
        assert done.stdout.count(" failed: ") == 19, done.stdout
        assert "ESCAPED" not in done.stdout
        assert "init lives" in done.stdout
        assert received == []
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_setuid_program_stays_the_agent(tmp_path: Path) -> None:
    async def body(workspace: BubblewrapWorkspace) -> None:
        script = (
            "cp /usr/bin/id i; chmod 6755 i; ./i -u; ./i -ru; find /usr/bin -perm -4000 -user 0 | head -1; su -c id"
        )
        done = await workspace.run(["sh", "-c", script])
        assert done.stdout.startswith("1000\n1000\n")
        assert "uid=0" not in done.stdout
        name = await workspace.snapshot()
        await workspace.restore(name)
        assert (await workspace.run(["stat", "-c", "%a", "i"])).stdout == "755\n"
        outside = os.stat(workspace._folder)
        assert outside.st_mode & 0o077 == 0  # nobody else on this machine comes to a file with rights that it left

    play(tmp_path, body)


def test_a_fork_bomb_stays_below_its_limit(tmp_path: Path) -> None:
    program = """
import os, time
made = 0
for _ in range(600):
    try:
        pid = os.fork()
    except OSError as error:
        print("stopped", made, error.errno)
        break
    if pid == 0:
        time.sleep(20)
        os._exit(0)
    made += 1
"""
    start = time.monotonic()
    done = python(tmp_path, program, max_processes=40)
    assert time.monotonic() - start < 20
    word, made, error = done.stdout.split()
    assert (word, error) == ("stopped", "11")
    assert 20 < int(made) < 40


BOMBS = {
    "one process": "x = bytearray(700 << 20)\ntime.sleep(5)",
    "many processes": "for _ in range(6):\n    if os.fork() == 0:\n        x = bytearray(b'x' * (60 << 20))\n"
    "        time.sleep(5)\n        os._exit(0)\ntime.sleep(5)",
    "shared": "m = mmap.mmap(-1, 500 << 20)\nfor i in range(0, 500 << 20, 4096): m[i] = 1\ntime.sleep(5)",
    "memory files": "fs = [os.memfd_create('x') for _ in range(8)]\n"
    "for f in fs: os.write(f, bytes(40 << 20))\ntime.sleep(5)",
    "/dev/shm": "for i in range(8): open(f'/dev/shm/{i}', 'wb').write(bytes(40 << 20))\ntime.sleep(5)",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_memory_bomb_ends_itself_alone(tmp_path: Path, bomb: str) -> None:
    start = time.monotonic()
    done = python(tmp_path, f"import mmap, os, time\n{BOMBS[bomb]}", memory_mb=200, address_space_mb=2048, disk_mb=100)
    assert done.ended == "killed"
    assert "memory_mb=200" in done.stderr or "disk_mb=100" in done.stderr
    assert time.monotonic() - start < 60


def test_the_address_space_of_a_process_has_the_kernels_limit(tmp_path: Path) -> None:
    assert "MemoryError" in python(tmp_path, "x = bytearray(400 << 20)", address_space_mb=300).stderr


FILLERS = {
    "one file": ("try: open('f', 'wb').write(bytes(60 << 20))\nfinally: os.unlink('f')", 1),
    "many files": ("for i in range(40): open(str(i), 'wb').write(bytes(4 << 20))\ntime.sleep(5)", "killed"),
    "no name": (
        "fs = [open(str(i), 'wb') for i in range(8)]\nfor i in range(8): os.unlink(str(i))\n"
        "for f in fs: f.write(bytes(10 << 20)); f.flush()\ntime.sleep(5)",
        "killed",
    ),
    "holes": ("for i in range(100): open(str(i), 'wb').truncate(40 << 20)\ntime.sleep(5)", "killed"),
    "names": ("os.mkdir('d')\nfor i in range(4000): open(f'd/{i}', 'w').close()\ntime.sleep(5)", "killed"),
    "hidden": (
        "os.mkdir('d')\nfor i in range(40): open(f'd/{i}', 'wb').write(bytes(4 << 20))\nos.chmod('d', 0)\n"
        "time.sleep(5)",
        "killed",
    ),
    "depth": ("for i in range(300): os.mkdir('d'); os.chdir('d')\ntime.sleep(5)", "killed"),
}


@pytest.mark.parametrize("filler", FILLERS)
def test_the_disk_is_not_filled(tmp_path: Path, filler: str) -> None:
    program, ended = FILLERS[filler]
    start = time.monotonic()
    done = python(tmp_path, f"import os, time\n{program}", disk_mb=50, max_files=1000)
    assert done.ended in (ended, "killed"), done  # the watch may be there before the kernel's limit is
    assert time.monotonic() - start < 60
    if ended == "killed":
        assert done.stderr.splitlines()[-1].startswith("workspace: ")


def test_a_workspace_above_its_disk_can_be_cleaned_up(tmp_path: Path) -> None:
    async def body(workspace: BubblewrapWorkspace) -> None:
        fill = "for i in 1 2 3 4 5 6 7 8 9; do head -c 8000000 /dev/zero > f$i; sleep 0.1; done; sleep 5"
        assert (await workspace.run(["sh", "-c", fill])).ended == "killed"
        with pytest.raises(WorkspaceFailed, match="disk_mb=40"):
            await workspace.snapshot()
        assert (await workspace.run(["sh", "-c", "sleep 0.3; rm f*; sleep 0.3"])).ended == 0
        assert await workspace.snapshot()

    play(tmp_path, body, disk_mb=40)


def test_links_are_not_followed_from_outside(tmp_path: Path) -> None:
    """Neither when a snapshot reads them, nor when one is written where they are, nor when they are removed."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("s3cret")

    async def body(workspace: BubblewrapWorkspace) -> None:
        script = f"ln -s {outside} folder; ln -s {outside}/secret file; ln -s / root; ln -s /proc/self/root self"
        assert (await workspace.run(["sh", "-c", script])).ended == 0
        name = await workspace.snapshot()
        archive = (tmp_path / "snapshots" / f"{name}.tar").read_bytes()
        assert b"s3cret" not in archive
        await workspace.run(["sh", "-c", "rm *; mkdir folder; echo planted > folder/secret; echo planted > file"])
        planted = await workspace.snapshot()
        await workspace.restore(name)
        await workspace.restore(planted)
        fork = await workspace.fork()
        await workspace.restore(name)
        await fork.close()
        # The folders themselves are the agent's: it may put a link in the place of neither.
        done = await workspace.run(["sh", "-c", f"rm -rf /work; ln -s {outside} /work; mv /tmp /work; ls -ld /work"])
        assert done.stdout.startswith("d")

    play(tmp_path, body)
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"secret": "s3cret"}


def test_no_hard_link_leads_out(tmp_path: Path) -> None:
    program = f"""
import os
for source in ("/etc/passwd", "/usr/bin/id", {PYTHON!r}, "/proc/self/exe"):
    attempt(source, lambda: os.link(source, "/work/linked"))
attempt("rename", lambda: os.rename("/etc/passwd", "/work/p"))
"""
    attempts(tmp_path, program, 5)


def test_a_daemon_does_not_outlive_its_command(tmp_path: Path) -> None:
    mark = f"mopd-daemon-{os.getpid()}"
    program = f"""
import os, signal, sys
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
if os.fork(): sys.exit(0)
os.setsid()
if os.fork(): os._exit(0)
for fd in range(3): os.close(fd)
os.execv("/bin/sleep", [{mark!r}, "60"])
"""
    assert python(tmp_path, program).ended == 0
    assert not running(mark)


def running(mark: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if mark.encode() in words and str(os.getpid()) != path.parent.name:
            found.append(path.parent.name)
    return found


def test_a_program_that_ignores_signals_ends_at_its_time(tmp_path: Path) -> None:
    program = "import signal, time\nfor n in (1, 2, 3, 13, 15): signal.signal(n, signal.SIG_IGN)\n"
    start = time.monotonic()
    assert python(tmp_path, program + "time.sleep(60)", timeout_s=1).ended == "timeout"
    assert time.monotonic() - start < 15


def test_cpu_time_and_open_files_are_limited(tmp_path: Path) -> None:
    program = "import os\nattempt('files', lambda: [os.open('/dev/null', 0) for _ in range(500)])\nwhile True: pass"
    done = python(
        tmp_path, "import sys\n" + program.replace("while", "sys.stdout.flush()\nwhile"), cpu_s=1, timeout_s=120
    )
    assert done.stdout == "files failed: OSError 24\n"
    assert done.ended in (128 + signal.SIGKILL, 128 + signal.SIGXCPU)


def test_a_flood_of_output_is_cut_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap_run, "FLOOD_BYTES", 4 << 20)
    done = python(tmp_path, "while True: sys.stdout.write('x' * 4096); sys.stderr.write('y')", output_bytes=1000)
    assert done.ended == "killed"
    assert done.stdout == "x" * 1000
    assert len(done.stderr) < 1100


def test_a_program_cannot_say_how_it_ended(tmp_path: Path) -> None:
    forge = "import os\nfor fd in range(3, 256):\n"
    forge += "    try: os.write(fd, b'{ \"exit-code\": 0 }')\n    except OSError: pass\n"
    assert python(tmp_path, forge + "os._exit(7)").ended == 7


def bomb(*members: tarfile.TarInfo, content: bytes = b"") -> io.BytesIO:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(content) if member.size else None)
    file.seek(0)
    return file


def member(name: str, kind: bytes = tarfile.REGTYPE, **fields: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    for field, value in fields.items():
        setattr(info, field, value)
    return info


HOSTILE = {
    "absolute": [member("/planted")],
    "parent": [member("../planted")],
    "parent inside": [member("d", tarfile.DIRTYPE), member("d/../../planted")],
    "through a link": [member("l", tarfile.SYMTYPE, linkname=".."), member("l/planted")],
    "over a link": [member("l", tarfile.SYMTYPE, linkname="../planted"), member("l")],
    "hard link to a link": [
        member("l", tarfile.SYMTYPE, linkname="../outside/secret"),
        member("h", tarfile.LNKTYPE, linkname="l"),
        member("h/x"),
    ],
    "hard link out": [member("h", tarfile.LNKTYPE, linkname="../outside/secret")],
    "device": [member("d", tarfile.CHRTYPE, devmajor=1, devminor=1)],
    "fifo": [member("d", tarfile.FIFOTYPE)],
    "twice": [member("f"), member("f")],
    "too large": [member("f", size=3 << 20)],
    "too many": [member(str(i)) for i in range(200)],
    "too deep": [member("/".join(["d"] * 90), tarfile.DIRTYPE)],
    "long name": [member("x" * 5000)],
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_archive_plants_nothing(tmp_path: Path, kind: str) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("s3cret")
    (tmp_path / "state").mkdir()
    state = os.open(tmp_path / "state", os.O_RDONLY)
    archive = bomb(*HOSTILE[kind], content=bytes(3 << 20))
    with pytest.raises(WorkspaceFailed):
        unpack(archive, state, Limits(disk_mb=1, max_files=100), owner=None)
    os.close(state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outside", "state"]
    assert (tmp_path / "outside" / "secret").read_text() == "s3cret"


def test_an_archive_that_ends_early_or_was_changed_is_refused(tmp_path: Path) -> None:
    async def body(workspace: BubblewrapWorkspace) -> None:
        await workspace.run(["sh", "-c", "echo kept > f"])
        name = await workspace.snapshot()
        file = tmp_path / "snapshots" / f"{name}.tar"
        whole = file.read_bytes()
        for changed in (whole[:-1024], whole.replace(b"kept", b"best"), b"", whole + bytes(512)):
            file.write_bytes(changed)
            with pytest.raises(WorkspaceFailed, match="does not hold what its name says"):
                await workspace.restore(name)
        assert (await workspace.run(["cat", "f"])).stdout == "kept\n"

    play(tmp_path, body)


@pytest.mark.parametrize("when", ["while it makes the sandbox", "while the program runs"])
def test_a_killed_driver_leaves_nothing_that_runs_and_its_files_to_the_next(tmp_path: Path, when: str) -> None:
    mark = f"mopd-orphan-{os.getpid()}-{when.split()[-1]}"
    program = f"""
import asyncio, sys, workspaces
async def main():
    workspace = await workspaces.local(sys.argv[1]).create()
    print(flush=True)
    await workspace.run(["sh", "-c", "touch begun; sleep 60 # {mark}"])
asyncio.run(main())
"""
    path = os.pathsep.join((str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")))
    with subprocess.Popen(
        [sys.executable, "-c", program, tmp_path], env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE
    ) as driver:
        assert driver.stdout is not None
        driver.stdout.readline()
        if when == "while the program runs":
            wait_until(lambda: any(tmp_path.glob("live/*/*/state/work/begun")))
        else:
            wait_until(lambda: any(name != str(driver.pid) for name in running(mark)))
        driver.kill()
    if when == "while the program runs":
        wait_until(lambda: not running(mark))
    assert len(list((tmp_path / "live").iterdir())) == 2

    def next_driver_ends_it() -> bool:  # one after it where the killed one's child still held its lock
        play(tmp_path, lambda workspace: workspace.run(["true"]))
        return not running(mark)

    wait_until(next_driver_ends_it)


def wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(200):
        if holds():
            return
        time.sleep(0.1)
    raise AssertionError("it did not come to hold within 20 s")


def test_a_tree_of_any_depth_and_any_rights_is_removed(tmp_path: Path) -> None:
    dig = "import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')\nos.chmod('.', 0)"
    (tmp_path / "deep").mkdir()
    subprocess.run([sys.executable, "-I", "-c", dig], cwd=tmp_path / "deep", check=True)
    remove(tmp_path / "deep")
    assert not (tmp_path / "deep").exists()


def test_what_keeps_a_sandbox_from_being_made_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"memory_mb=0 must be"):
        local(tmp_path, memory_mb=0)
    with pytest.raises(UserError, match=r"unexpected keyword argument 'memory'"):
        local(tmp_path, memory=1)
    with pytest.raises(UserError, match=r"read_only names relative"):
        local(tmp_path, read_only=["relative"])
    with pytest.raises(UserError, match=r"x86_64 and aarch64, not of riscv64"):
        system_call_filter("riscv64")
    wrong = local(tmp_path, user=4242424)
    object.__setattr__(wrong.bubblewrap, "program", "/bin/false")
    with pytest.raises(UserError, match=r"bubblewrap makes no sandbox here: .* in 3 tries"):
        asyncio.run(wrong.create())
    asyncio.run(wrong.close())
    monkeypatch.setattr(bubblewrap_command.shutil, "which", lambda _: None)
    with pytest.raises(UserError, match=r"bwrap: apt-get install -y bubblewrap"):
        local(tmp_path)


def test_only_named_snapshots_are_kept(tmp_path: Path) -> None:
    async def body(workspace: BubblewrapWorkspace) -> None:
        first = await workspace.snapshot()
        await workspace.run(["touch", "f"])
        second = await workspace.snapshot()
        factory: BubblewrapWorkspaces = workspace._factory
        (tmp_path / "snapshots" / ".part-left").touch()
        factory.keep_only([second])
        assert [path.name for path in (tmp_path / "snapshots").iterdir()] == [f"{second}.tar"]
        with pytest.raises(WorkspaceFailed, match="no snapshot"):
            await workspace.restore(first)

    play(tmp_path, body)
