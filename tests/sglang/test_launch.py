"""Servers of the keeper, for real: they come up, come back at the same URL, and none stays, whoever is killed.

The ends are tried in the middle of a start, when a server's processes are hardest to find: its scheduler does not yet
watch over its parent.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from running import StartServers

from megatron_mopd.config import Config
from megatron_mopd.errors import UserError
from megatron_mopd.servers.launch import check_keeper, endpoints, servers
from megatron_mopd.telemetry.record import replace_file

pytestmark = pytest.mark.sglang
ROOT = Path(__file__).parents[2]
START_S = 400.0
"""Longer than it takes: one server starts at a time on a machine."""
END_S = 20.0
KEY = "a-key-that-must-not-be-seen"

RUN = """
import sys, time
from megatron_mopd.config import load_config
from megatron_mopd.servers.launch import servers
with servers(load_config([sys.argv[1]])):
    time.sleep(600)
"""


def processes_of(run_folder: Path) -> list[psutil.Process]:
    """Everything in the process groups of the servers whose output goes to this run folder."""
    leaders = [p for p in psutil.process_iter() if "child.py" in " ".join(cmdline(p)) and owns_log(p, run_folder)]
    groups = {p.pid for p in leaders}
    return [p for p in psutil.process_iter() if group_of(p) in groups]


def owns_log(process: psutil.Process, run_folder: Path) -> bool:
    try:
        return Path(f"/proc/{process.pid}/fd/1").readlink().is_relative_to(run_folder)
    except OSError:  # ended in between
        return False


def group_of(process: psutil.Process) -> int:
    try:
        return os.getpgid(process.pid)
    except ProcessLookupError:
        return 0


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.1)


def assert_all_end(processes: list[psutil.Process]) -> None:
    deadline = time.monotonic() + END_S
    while (alive := [p for p in processes if not has_ended(p)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert alive == [], f"{[' '.join(cmdline(p))[:80] for p in alive]} stay"


def has_ended(process: psutil.Process) -> bool:
    """A zombie has, whether its parent has seen it or not."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def status(url: str, key: str | None = None) -> int:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code


def test_a_killed_server_is_started_again_at_its_url(
    start_servers: StartServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a key, which nobody sees; and nothing of it stays after an orderly end."""
    monkeypatch.setenv("MOPD_TEST_KEY", KEY)
    with start_servers(tmp_path, sglang={"api_key_env": "MOPD_TEST_KEY"}) as started:
        url, first_pid = started.urls["student-0"], started.pid("student-0")
        assert (status(f"{url}/model_info"), status(f"{url}/model_info", KEY)) == (401, 200)
        first = processes_of(tmp_path)
        assert len(first) >= 4  # leader, server, scheduler, detokenizer
        assert not any(KEY in word for p in first for word in cmdline(p))

        started.kill("student-0")
        assert_all_end(first)
        wait_until(lambda: started.pid("student-0") != first_pid, START_S, "a new start")
        assert endpoints(tmp_path) == {"student-0": url}  # test_failover.py waits until it serves there again
        second = processes_of(tmp_path)
    assert_all_end(second)
    assert KEY not in (tmp_path / "logs/sglang-student-0.log").read_text()
    assert "starting it again" in (tmp_path / "logs/keeper.log").read_text()
    with pytest.raises(UserError, match="has ended"):
        check_keeper(tmp_path)


class Running:
    """`mopd serve`, or a run with servers, in a process of its own."""

    def __init__(self, config: Config, command: list[str]):
        self.folder = config.run.folder
        self.folder.mkdir()
        replace_file(self.folder / "config.yaml", config.dump())
        words = [sys.executable, *command, str(self.folder / "config.yaml")]
        self.process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def server_processes(self) -> list[psutil.Process]:
        """Once the server has spawned its scheduler."""
        wait_until(lambda: len(processes_of(self.folder)) >= 4, START_S, "a scheduler")
        return processes_of(self.folder)

    def keeper(self) -> psutil.Process:
        return next(
            p for p in psutil.Process(self.process.pid).children() if "megatron_mopd.servers.keeper" in p.cmdline()
        )


@pytest.fixture
def run(make_config: Callable[..., Config], tmp_path: Path) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def start(*command: str, **tables: object) -> Running:
        started.append(Running(make_config(tmp_path / "run", **tables), list(command)))
        return started[-1]

    yield start
    for running in started:
        running.process.kill()  # what it has started ends with it
        running.process.communicate()


@pytest.mark.parametrize(
    ("victim", "number"), [("parent", signal.SIGKILL), ("keeper", signal.SIGKILL), ("keeper", signal.SIGTERM)]
)
def test_no_server_stays_when_the_run_is_killed(
    run: Callable[..., Running], victim: str, number: signal.Signals
) -> None:
    running = run("-c", RUN)
    processes = running.server_processes()
    keeper = running.keeper()
    os.kill(running.process.pid if victim == "parent" else keeper.pid, number)
    assert_all_end([keeper, *processes])
    if number == signal.SIGTERM:
        assert endpoints_are_gone(running.folder)


def endpoints_are_gone(folder: Path) -> bool:
    return list((folder / "endpoints").glob("*.json")) == []


def test_mopd_serve_ends_its_servers_at_ctrl_c(run: Callable[..., Running]) -> None:
    """While it is at work, a run in the same folder uses its servers and does not end them."""
    running = run("-m", "megatron_mopd.cli", "serve")
    processes = running.server_processes()
    with servers(load(running.folder)):
        assert list(endpoints(running.folder)) == ["student-0"]
    check_keeper(running.folder)
    running.process.send_signal(signal.SIGINT)
    running.process.communicate(timeout=END_S)
    assert running.process.returncode == 130
    assert_all_end(processes)
    assert endpoints_are_gone(running.folder)


def load(folder: Path) -> Config:
    from megatron_mopd.config import load_config

    return load_config([folder / "config.yaml"])


def test_an_option_that_sglang_does_not_know_is_one_line(run: Callable[..., Running]) -> None:
    running = run("-m", "megatron_mopd.cli", "serve", sglang={"server": {"tensor_sise": 2}})
    printed, _ = running.process.communicate(timeout=START_S)
    assert running.process.returncode == 2
    assert printed.splitlines() == [
        "mopd: error: sglang: student-0 refuses its arguments: sglang serve: error: unrecognized arguments: "
        "--tensor-sise 2"
    ]
    with pytest.raises(UserError, match="unrecognized arguments: --tensor-sise 2"):
        check_keeper(running.folder)
