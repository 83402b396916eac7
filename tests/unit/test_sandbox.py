"""Laws of the sandbox: a program's fault is an Execution, its limits hold, and nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path

import pytest

from megatron_mopd.errors import UserError
from megatron_mopd.protocols import Execution
from megatron_mopd.sandbox import process
from megatron_mopd.sandbox.process import ProcessSandbox

SANDBOX = ProcessSandbox(timeout_s=1, cpu_s=5, memory_mb=256, output_bytes=1000, max_processes=2)


def run(program: str, stdin: str = "") -> Execution:
    return asyncio.run(SANDBOX.run(program, stdin))


def test_a_program_reads_its_input_and_prints() -> None:
    assert run("print(int(input()) * 2)", "21\n") == Execution("42\n", "", 0)


@pytest.mark.parametrize(
    ("program", "ended"),
    [
        ("raise SystemExit(3)", 3),
        ("def f(", 1),
        ("x = bytearray(1 << 30)", 1),
        ("while True: pass", "timeout"),
        ("import time; time.sleep(60)", "timeout"),
        ("x = '\ud800'", "refused"),
    ],
)
def test_a_fault_of_the_program_is_how_it_ended(program: str, ended: int | str) -> None:
    start = time.monotonic()
    assert run(program).ended == ended
    assert time.monotonic() - start < 5


def test_output_is_cut() -> None:
    execution = run("import sys\nwhile True: sys.stdout.write('x' * 100)")
    assert len(execution.stdout) <= 1000
    assert execution.ended != 0


def test_cpu_time_is_limited() -> None:
    impatient = ProcessSandbox(timeout_s=20, cpu_s=1)
    start = time.monotonic()
    assert impatient.run_blocking("while True: pass", "").ended == "killed"
    assert time.monotonic() - start < 15


def test_secrets_of_the_environment_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOPD_TEST_SECRET", "s3cret")
    assert "s3cret" not in run("import os; print(dict(os.environ))").stdout


def test_there_is_no_network() -> None:
    if not SANDBOX.is_isolated:
        pytest.skip("this kernel gives the user no namespaces")
    program = "import socket\ns = socket.socket(); s.settimeout(0.5); s.connect(('192.0.2.1', 9))"
    assert "unreachable" in run(program).stderr


def test_nothing_of_a_program_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not SANDBOX.is_isolated:
        pytest.skip("this kernel gives the user no namespaces")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mark = f"mopd-orphan-{os.getpid()}"
    orphan = f"import os, sys\nif os.fork() == 0:\n    os.setsid(); os.execv({'/bin/sleep'!r}, [{mark!r}, '60'])"
    assert run(orphan).ended == 0
    words = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [word for word in words if mark.encode() in word]
    assert not list(tmp_path.iterdir())


def test_a_kernel_without_namespaces_is_named_and_the_other_limits_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    child = tmp_path / "child.py"
    child.write_text(process.CHILD.read_text().replace("isolated = isolate()", "isolated = False"))
    monkeypatch.setattr(process, "CHILD", child)
    sandbox = ProcessSandbox(timeout_s=1)
    assert not sandbox.is_isolated
    assert sandbox.run_blocking("while True: pass", "").ended == "timeout"
    assert sandbox.run_blocking("print(input())", "a").stdout == "a\n"
    assert capfd.readouterr().err.count("no namespaces") == 1


def test_a_program_cannot_say_how_it_ended() -> None:
    forge = "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'0 1')\n    except OSError: pass\n"
    forge += "raise SystemExit(7)"
    assert run(forge).ended == 7


def test_runs_share_nothing_and_run_side_by_side() -> None:
    async def both() -> list[Execution]:
        programs = [f"import os, time; time.sleep(0.3); open('f', 'x').write('{i}'); print({i})" for i in range(4)]
        return await asyncio.gather(*(SANDBOX.run(program, "") for program in programs))

    assert [execution.stdout for execution in asyncio.run(both())] == ["0\n", "1\n", "2\n", "3\n"]


def test_limits_that_are_no_limits_are_refused() -> None:
    with pytest.raises(UserError, match=r"memory_mb=0 .* at least 1"):
        ProcessSandbox(memory_mb=0)
