"""The W&B sink: its client runs in a child process, fed with JSON lines over a pipe.

In the trainer the client would compete for the interpreter lock, and its exit hook holds the process for up to 90 s
when the server does not answer. A child can be killed. It also outlives a killed trainer: it sees the end of the pipe,
writes out what it has, and marks the run as failed, so that no row is lost.

The API key comes from the environment (WANDB_API_KEY) and is written nowhere. RUN/wandb/run_id keeps the id over a
resume.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

ORPHAN_TIMEOUT_S = 60
"""How long the child goes on uploading after the trainer has gone."""


class WandbSink:
    name = "W&B"

    def __init__(self, run_folder: Path, project: str, mode: str, config: Mapping[str, Any], resumed: bool) -> None:
        self._folder = run_folder / "wandb"
        self._first_line = {
            "project": project,
            "mode": mode,
            "name": run_folder.name,
            "dir": str(run_folder),
            "config": config,
            "id": _run_id(self._folder, resumed),
        }
        self._child: subprocess.Popen[str] | None = None
        self._killed = False

    def start(self) -> None:
        with (self._folder / "client.log").open("w") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={
                    "WANDB_ERROR_REPORTING": "false",
                    **os.environ,
                },  # W&B's reports on itself; the user's word goes first
                start_new_session=True,  # Ctrl-C is for the trainer, which then ends the pipe
            )
        if self._killed:  # given up between the two lines above
            self._child.kill()
        self._send(self._first_line)
        assert self._child.stdout is not None
        with self._child.stdout as ready:
            if ready.readline() != "ready\n":
                raise RuntimeError(self._last_words())

    def log(self, step: int, row: Mapping[str, float]) -> None:
        self._send({"step": step, "row": dict(row)})

    def finish(self, failed: bool) -> None:
        assert self._child is not None
        self._send({"exit_code": int(failed)})
        assert self._child.stdin is not None
        self._child.stdin.close()
        if self._child.wait() != 0:
            raise RuntimeError(self._last_words())

    def kill(self) -> None:
        self._killed = True
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            assert self._child.stdin is not None
            with contextlib.suppress(OSError):  # what could not be sent to it
                self._child.stdin.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(message) + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(self._last_words()) from None

    def _last_words(self) -> str:
        log = self._folder / "client.log"
        lines = log.read_text(errors="replace").splitlines()
        return f"{lines[-1] if lines else 'its process ended without a word'}; see {log}"


def _run_id(folder: Path, resumed: bool) -> str:
    """The id of this run: the one on disk when it is resumed, else a new one."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "run_id"
    if not (resumed and file.exists()):
        file.write_text(secrets.token_hex(4))
    return file.read_text()


def main() -> None:
    """The child: `python -m megatron_mopd.telemetry.wandb_sink`, started by WandbSink.start."""
    import wandb

    lines, ready = _take_pipes()
    first = json.loads(lines.readline())
    run = wandb.init(
        project=first["project"],
        mode=first["mode"],
        name=first["name"],
        id=first["id"],
        dir=first["dir"],
        config=first["config"],
        resume="allow",
        # No git: the address of a remote can hold a token. No statistics: they would be those of this process.
        settings=wandb.Settings(console="off", silent=True, disable_git=True, save_code=False, x_disable_stats=True),
    )
    with ready:
        ready.write("ready\n")
    exit_code = 1  # unless the trainer says otherwise before the pipe ends
    for line in lines:
        if not line.endswith("\n"):  # the trainer was killed in the middle of it
            break
        message = json.loads(line)
        if "exit_code" in message:
            exit_code = message["exit_code"]
        else:
            # With explicit steps W&B leaves out the rows that it has already; a resumed run makes the same ones again.
            run.log(message["row"], step=message["step"])
    signal.alarm(ORPHAN_TIMEOUT_S)
    run.finish(exit_code=exit_code)


def _take_pipes() -> tuple[TextIO, TextIO]:
    """Standard input and output as files of our own, so that neither W&B's prints nor its service process touch the
    pipes."""
    lines, ready = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    return lines, ready


if __name__ == "__main__":
    main()
