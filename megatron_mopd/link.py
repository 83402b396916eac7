"""The link between the trainer's rank 0 and the driver: small JSON lines over a socket pair, no port, no pickle.

Trainer: {"step": 3, "weights": ".../weights/v00000003", "weight_version": 3}. Driver: {"step": 3} once the batch is
in the store, or {"step": 3, "error": "..."}. The end of either process closes the socket, which the other notices
at once; the trainer then starts the driver again, which finds the finished steps in the store.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_mopd.errors import UserError
from megatron_mopd.ranks import LAUNCHER


@dataclass(frozen=True)
class StepRequest:
    step: int
    weights: str | None
    """Folder of the weights; None where the rollout engine has them already."""
    weight_version: int


class Link:
    """The driver's end. One task reads, so that the end of the trainer is noticed in the middle of a step."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._requests: asyncio.Queue[StepRequest | None] = asyncio.Queue()
        self._open_step = 0
        self._step_is_open = asyncio.Event()
        self._reading = asyncio.create_task(self._read(reader))

    @classmethod
    async def open(cls, fd: int) -> Link:
        return cls(*await asyncio.open_connection(sock=socket.socket(fileno=fd)))

    async def receive(self) -> StepRequest | None:
        """The next request, or None when the trainer has hung up."""
        request = await self._requests.get()
        if request is not None:
            self._open_step = request.step
            self._step_is_open.set()
        return request

    async def reply(self, step: int, error: str | None = None) -> None:
        self._step_is_open.clear()
        self._writer.write(json.dumps({"step": step, **({"error": error} if error else {})}).encode() + b"\n")
        await self._writer.drain()

    async def fetch_weights(self) -> tuple[int, Path]:
        """Ask for the weights of the step that is being made as a folder, for a server that was not there when they
        were broadcast; wait for the next step where none is. Returns their version and the folder."""
        await self._step_is_open.wait()
        self._writer.write(json.dumps({"step": self._open_step, "needs": "weights"}).encode() + b"\n")
        await self._writer.drain()
        request = await self._requests.get()
        if request is None or request.weights is None:
            raise ConnectionResetError("the trainer has hung up")
        return request.weight_version, Path(request.weights)

    async def closed(self) -> None:
        await self._reading

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            self._requests.put_nowait(StepRequest(**json.loads(line)))
        self._requests.put_nowait(None)


class DriverProcess:
    """The trainer's end (rank 0): starts the driver, asks for steps, starts it again when it dies, at most
    `max_restarts` times."""

    def __init__(self, run_folder: Path, max_restarts: int, timeout_s: float) -> None:
        self._run_folder, self._restarts_left, self._timeout_s = run_folder, max_restarts, timeout_s
        self._start()

    def request(self, request: StepRequest) -> bool:
        """Return True when the batch of `request.step` is in the store; False when the driver needs the weights as a
        folder first: ask again with one.

        Raises UserError with the driver's own reason, RuntimeError when it keeps dying or does not answer in time.
        """
        while True:
            answer = self._ask(request)
            if answer is not None:
                break
            self._process.wait()
            if not self._restarts_left:
                raise RuntimeError(f"the driver died (exit code {self._process.returncode}); see {self._log}")
            self._restarts_left -= 1
            self._start()
        if "error" in answer:
            raise UserError(answer["error"])
        assert answer["step"] == request.step, f"asked for step {request.step}, the driver answered {answer}"
        return "needs" not in answer

    def close(self) -> None:
        self._lines.close()  # it holds the socket open
        self._socket.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(self._timeout_s)
        self._log = self._run_folder / "driver.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megatron_mopd.driver", str(self._run_folder), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment_without_torchrun(),
                start_new_session=True,  # Ctrl-C reaches the trainer, which then hangs up
            )
        theirs.close()
        self._socket, self._lines = ours, ours.makefile("rb")

    def _ask(self, request: StepRequest) -> dict | None:
        """The driver's answer, or None if it died."""
        try:
            self._socket.sendall(json.dumps(asdict(request)).encode() + b"\n")
            line = self._lines.readline()
        except TimeoutError:
            raise RuntimeError(
                f"no batch from the driver for {self._timeout_s:.0f} s (run.timeout_s); see {self._log}"
            ) from None
        except (BrokenPipeError, ConnectionResetError):
            return None
        return json.loads(line) if line else None


def environment_without_torchrun() -> dict[str, str]:
    """For a process that rank 0 starts and that is no rank itself."""
    torchrun = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    ours = (*torchrun, LAUNCHER)
    return {k: v for k, v in os.environ.items() if k not in ours and not k.startswith("TORCHELASTIC_")}
