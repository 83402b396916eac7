"""One stage: `mopd pipeline FILE --stage NAME`. The local runner starts it, Slurm runs it, and so can a user.

    lock -> record "begun" -> command, in a process group of its own, output to RUN/logs/NAME.log -> record "done"

Promises (tests/unit/test_pipeline_runs.py): two never work at the same stage; asked to end (SIGTERM, SIGINT), or left
by its parent, it ends its command's group, first with SIGTERM, after GRACE_S with SIGKILL; killed outright, its command
is told to end by the kernel, and holds the lock until it has; whatever was killed, the same command goes on.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO

from megatron_mopd.errors import UserError
from megatron_mopd.pipeline.graph import Pipeline, Stage
from megatron_mopd.pipeline.stamps import Stamps
from megatron_mopd.run_lock import try_lock

GRACE_S = 45.0
"""torchrun gives its ranks 30 s."""
LOCK_WAIT_S = GRACE_S + 15.0
"""What a killed stage may need to end."""
POLL_S = 0.05
LAST_LINES, LAST_BYTES = 12, 1 << 16
PR_SET_PDEATHSIG = 1


class Stop:
    """Set by SIGTERM and SIGINT: looked at where it is safe to end, never in the middle of a record."""

    def __init__(self) -> None:
        self.number: int | None = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._set)

    def _set(self, number: int, _: object) -> None:
        self.number = number


def run_stage(pipeline: Pipeline, stage: Stage) -> int:
    """Make the stage if it is not done; the exit code of `mopd`. UserError where its needs are not done."""
    stop, stamps = Stop(), Stamps(pipeline)
    with _locked(stamps.lock_file(stage), stage, stop) as lock:
        done = stamps.done()
        if missing := [need for need in stage.needs if need not in done]:
            raise UserError(
                f"stage {stage.name} needs {', '.join(missing)}, not done yet; run the pipeline without --stage"
            )
        if stage.name in done:
            return 0
        record = stamps.begin(stage)
        code = _run_command(stage, stamps.log_file(stage), lock, stop)
        if stop.number is not None and code != 0:  # not a failure: the record stays "begun"
            return 128 + stop.number
        reason = _reason(code, stage)
        state = "failed" if reason else "done"
        stamps.write(stage, replace(record, state=state, ended_at=time.time(), code=code))
    if reason:
        _say_failure(stage, reason, stamps.log_file(stage))
    return 1 if reason else 0


@contextmanager
def _locked(file: Path, stage: Stage, stop: Stop) -> Iterator[int]:
    """Hold the stage's lock; the descriptor that holds it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + LOCK_WAIT_S
    with file.open("a+") as opened:
        while not try_lock(opened.fileno()):
            if time.monotonic() > deadline or stop.number is not None:
                raise UserError(f"stage {stage.name} is being made by another process; wait for it, or end it")
            time.sleep(POLL_S)
        yield opened.fileno()


def _run_command(stage: Stage, log_file: Path, lock: int, stop: Stop) -> int:
    """The command's exit code, -signal where one ended it; nothing of its group is left."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("ab") as log:
        log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(stage.command)}\n".encode())
        log.flush()
        process = _start(stage, log, lock)
        try:
            _wait(process, stop)
        finally:
            _end_group(process)
    return process.returncode


def _start(stage: Stage, log: IO[bytes], lock: int) -> subprocess.Popen[bytes]:
    parent = os.getpid()
    try:
        return subprocess.Popen(
            resolved(stage.command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[lock],
            start_new_session=True,
            preexec_fn=lambda: end_with_parent(parent),
        )
    except OSError as error:
        raise UserError(f"stage {stage.name}: {stage.command[0]} cannot be started: {error.strerror}") from None


def end_with_parent(parent: int) -> None:
    """In a child, before it becomes its command: the kernel tells it to end when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # gone before the kernel was asked
        os._exit(1)


def resolved(command: Sequence[str]) -> list[str]:
    """`mopd` and `python` as this environment's own."""
    own = {"mopd": [sys.executable, "-m", "megatron_mopd.cli"], "python": [sys.executable]}
    return [*own.get(command[0], [command[0]]), *command[1:]]


def _wait(process: subprocess.Popen[bytes], stop: Stop) -> None:
    asked_at = None
    while not _has_ended(process.pid):
        if stop.number is not None and asked_at is None:
            asked_at = time.monotonic()
            os.killpg(process.pid, signal.SIGTERM)
        if asked_at is not None and time.monotonic() > asked_at + GRACE_S:
            return
        time.sleep(POLL_S)


def _has_ended(pid: int) -> bool:
    """Not yet reaped, so that its group's id is still its own."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end_group(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _reason(code: int, stage: Stage) -> str | None:
    """Why the stage has failed, None if it has not."""
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    if code > 0:
        return f"ended with exit code {code}"
    return None if stage.produces.exists() else f"ended well, without making {stage.produces}"


def _say_failure(stage: Stage, reason: str, log_file: Path) -> None:
    with log_file.open("rb") as log:
        log.seek(-min(LAST_BYTES, log_file.stat().st_size), os.SEEK_END)
        lines = log.read().decode(errors="replace").splitlines()[-LAST_LINES:]
    quoted = "".join(f"    {line}\n" for line in lines)
    print(f"stage {stage.name} {reason}; the end of {log_file}:\n{quoted}", end="", file=sys.stderr, flush=True)
