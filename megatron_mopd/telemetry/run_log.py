"""Everything that rank 0 reports in a run: the record first, then the sinks, then the terminal.

with RunLog(config, next_step=1) as log:
    log.step(metrics, rollout, {"step": 1.7, "wait": 1.1, "update": 0.5, "sync": 0.1})
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from megatron_mopd.config import Config
from megatron_mopd.step_metrics import StepMetrics
from megatron_mopd.telemetry.display import Display
from megatron_mopd.telemetry.record import Record
from megatron_mopd.telemetry.row import step_row
from megatron_mopd.telemetry.sinks import check_sinks, open_sinks


class RunLog:
    def __init__(self, config: Config, next_step: int) -> None:
        """`next_step` is the step of the next row: 1, or the checkpoint's + 1. Raises UserError (see open_sinks)."""
        config.run.folder.mkdir(parents=True, exist_ok=True)
        check_sinks(config.telemetry)
        self._record = Record(config.run.folder, next_step)
        self._sinks = open_sinks(config, next_step)
        self._display = Display(
            config.run.folder.name,
            config.run.num_steps,
            config.prompts.cells,
            done_steps=next_step - 1,
            live=config.telemetry.display,
        )

    def __enter__(self) -> RunLog:
        self._display.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._display.__exit__(kind, error, traceback)
        for sink in self._sinks:
            sink.finish(failed=error is not None)
        self._record.close()

    def step(self, metrics: StepMetrics, rollout: Mapping[str, Any] | None, seconds: Mapping[str, float]) -> None:
        """Report one update; see row.step_row for the arguments."""
        row = step_row(metrics, rollout, seconds)
        self._record.append(metrics.step, row)
        for sink in self._sinks:
            sink.log(metrics.step, row)
        self._display.update(metrics.step, row)
