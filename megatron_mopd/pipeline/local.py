"""The stages of a pipeline on this machine, as many side by side as `max_parallel` allows.

Each is a process of its own (stage.py). Of those that could start, the one with the longest chain waiting for it goes
first. Promises (tests/unit/test_pipeline_runs.py): what is done is not started; a failed stage stops what depends on
it and nothing else; asked to end, or killed, it leaves no stage at work; the exit code is 0 only if all is done.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from megatron_mopd.pipeline.graph import Pipeline, Stage
from megatron_mopd.pipeline.stage import POLL_S, Stop, end_with_parent
from megatron_mopd.pipeline.stamps import Stamps
from megatron_mopd.run_lock import locked

Say = Callable[[str], None]


def run_here(pipeline: Pipeline, words: Sequence[str], say: Say) -> int:
    """Make what is not done. `words` are those of `mopd pipeline` that name this pipeline."""
    with locked(pipeline.folder / "pipeline"):
        return _Runner(pipeline, words, say).run()


class _Runner:
    def __init__(self, pipeline: Pipeline, words: Sequence[str], say: Say) -> None:
        self.pipeline, self.words, self.say = pipeline, words, say
        self.stop, self.stamps = Stop(), Stamps(pipeline)
        self.done = self.stamps.done()
        self.failed: set[str] = set()
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def run(self) -> int:
        try:
            while self.stop.number is None and (self._start_ready() or self.running):
                self._collect()
                time.sleep(POLL_S)
        finally:
            self._end_running()
        if self.stop.number is not None:
            self.say("interrupted; the same command goes on")
            return 128 + self.stop.number
        return 1 if self.failed else 0

    def _start_ready(self) -> bool:
        ready = [stage for stage in self.pipeline.ordered if self._is_ready(stage)]
        ready.sort(key=lambda stage: -self.pipeline.stages_after[stage.name])
        for stage in ready[: self.pipeline.max_parallel - len(self.running)]:
            self.say(f"{stage.name}: started, see {self.stamps.log_file(stage)}")
            self.running[stage.name] = start_stage(self.words, stage)
        return bool(ready)

    def _is_ready(self, stage: Stage) -> bool:
        untouched = stage.name not in self.done | self.failed | self.running.keys()
        return untouched and self.done.issuperset(stage.needs)

    def _collect(self) -> None:
        for name, process in list(self.running.items()):
            if (code := process.poll()) is None:
                continue
            del self.running[name]
            (self.failed if code else self.done).add(name)
            record = self.stamps.read(self.pipeline.by_name[name])
            took = f" after {record.seconds:.0f} s" if record and record.seconds is not None else ""
            self.say(f"{name}: {'failed' if code else 'done'}{took}")

    def _end_running(self) -> None:
        """Each ends its command and then itself."""
        for process in self.running.values():
            process.send_signal(signal.SIGTERM)
        for process in self.running.values():
            process.wait()


def start_stage(words: Sequence[str], stage: Stage) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "megatron_mopd.cli", "pipeline", *words, "--stage", stage.name]
    parent = os.getpid()
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=lambda: end_with_parent(parent)
    )
