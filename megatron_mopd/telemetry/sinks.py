"""Where rows go besides the record: W&B and TensorBoard, behind a guard that training cannot feel.

Promises: a sink that raises or blocks, at its start, at a row or at its end, costs training one warning and at most
`finish_timeout_s` at the end of the run, and is off from then on; `metrics.jsonl` is complete without any sink. Both
are optional packages, imported only when configured.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from megatron_mopd.config import Config, Telemetry
from megatron_mopd.errors import UserError
from megatron_mopd.telemetry.redact import redact

Row = Mapping[str, float]
logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Called from one worker thread, in this order. Any method may raise or block; `kill` may not."""

    name: str

    def start(self) -> None: ...
    def log(self, step: int, row: Row) -> None: ...
    def finish(self, failed: bool) -> None: ...
    def kill(self) -> None:
        """Let go of everything at once; called from the main thread when the others have been given up."""
        ...


class GuardedSink:
    """A sink in a worker thread behind a bounded queue. `log` and `finish` never raise."""

    def __init__(
        self,
        sink: Sink,
        queue_rows: int = 256,
        finish_timeout_s: float = 30.0,
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        self._sink, self._finish_timeout_s, self._warn = sink, finish_timeout_s, warn
        self._rows: queue.Queue[tuple[int, Row] | None] = queue.Queue(queue_rows)
        self._failed = False
        self._off = threading.Event()
        self._off_lock = threading.Lock()
        self._worker = threading.Thread(target=self._run, name=f"sink {sink.name}", daemon=True)
        self._worker.start()

    def log(self, step: int, row: Row) -> None:
        if self._off.is_set():
            return
        try:
            self._rows.put_nowait((step, row))
        except queue.Full:
            self._turn_off(f"it has not taken a row for {self._rows.maxsize} steps")

    def finish(self, failed: bool = False) -> None:
        """Hand over what is queued and close, in at most `finish_timeout_s`; `failed` marks the run as such."""
        self._failed = failed
        try:
            self._rows.put_nowait(None)
        except queue.Full:
            self._turn_off("it does not take rows")
        if not self._off.is_set():
            self._worker.join(self._finish_timeout_s)
            if self._worker.is_alive():
                self._turn_off(f"it did not finish within {self._finish_timeout_s:g} s")

    def _run(self) -> None:
        # The one broad except of the project: whatever a third party's client raises must not reach the training loop.
        try:
            self._sink.start()
            while (item := self._rows.get()) is not None:
                self._sink.log(*item)
            self._sink.finish(self._failed)
        except Exception as error:
            self._turn_off(f"{type(error).__name__}: {error}".splitlines()[0])

    def _turn_off(self, reason: str) -> None:
        with self._off_lock:
            if self._off.is_set():
                return
            self._off.set()
        self._warn(f"{self._sink.name} is off for the rest of this run ({reason}); metrics.jsonl stays complete")
        self._sink.kill()


class TensorBoardSink:
    """Event files in RUN/tensorboard. Rows of a resumed step hide the ones that were written before the kill."""

    name = "TensorBoard"

    def __init__(self, run_folder: Path, next_step: int) -> None:
        self._folder, self._next_step = run_folder / "tensorboard", next_step

    def start(self) -> None:
        from torch.utils.tensorboard import SummaryWriter  # seconds to import, and only here

        self._writer = SummaryWriter(str(self._folder), purge_step=self._next_step)

    def log(self, step: int, row: Row) -> None:
        for key, value in row.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def finish(self, failed: bool) -> None:
        self._writer.close()

    def kill(self) -> None:
        pass  # its threads are daemons


def check_sinks(telemetry: Telemetry, environment: Mapping[str, str] = os.environ) -> None:
    """UserError when a package or the W&B key that `telemetry:` asks for is missing."""
    if telemetry.tensorboard:
        _require("tensorboard", "telemetry.tensorboard")
    if telemetry.wandb != "disabled":
        _require("wandb", "telemetry.wandb")
    if telemetry.wandb == "online" and not environment.get("WANDB_API_KEY"):
        raise UserError("telemetry.wandb=online needs the environment variable WANDB_API_KEY; or set it to offline")


def open_sinks(config: Config, next_step: int, environment: Mapping[str, str] = os.environ) -> list[GuardedSink]:
    """The sinks that `telemetry:` asks for, started. UserError as `check_sinks`."""
    check_sinks(config.telemetry, environment)
    sinks: list[Sink] = []
    if config.telemetry.tensorboard:
        sinks.append(TensorBoardSink(config.run.folder, next_step))
    if config.telemetry.wandb != "disabled":
        sinks.append(_wandb_sink(config, next_step, environment))
    return [GuardedSink(sink) for sink in sinks]


def _wandb_sink(config: Config, next_step: int, environment: Mapping[str, str]) -> Sink:
    from megatron_mopd.telemetry.wandb_sink import WandbSink

    published: dict[str, Any] = redact(config.model_dump(mode="json"), environment)
    return WandbSink(
        config.run.folder, config.telemetry.wandb_project, config.telemetry.wandb, published, resumed=next_step > 1
    )


def _require(package: str, option: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{option} needs the package {package}: pip install {package}, or turn it off")
