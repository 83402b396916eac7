"""RUN/trace.json: what each part of a run did when, to be opened in https://ui.perfetto.dev or chrome://tracing.

Trainer and driver append to one file, in the trace event format (JSON array, whose closing bracket may be missing;
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU). Each process is a group of tracks:
the steps' parts, and in the driver one track per lane, whose batches overlap sampling.

Promise (tests/unit/test_trace.py): a line is written whole, so that whatever ends a process leaves a readable file.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

FILE = "trace.json"


class Trace:
    """`process` is "trainer" or "driver". Without a file nothing is written."""

    def __init__(self, file: Path | str | None, process: str = "") -> None:
        self._fd = None
        self._ids, self._pid = count(), os.getpid()
        if file is not None:
            self._fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            if not os.fstat(self._fd).st_size:
                os.write(self._fd, b"[\n")
            self._write(name="process_name", ph="M", args={"name": process})

    @contextmanager
    def span(self, name: str, track: str, **args: Any) -> Iterator[None]:
        """The time that the body takes. Spans of a track may overlap."""
        start = time.time_ns() // 1000
        try:
            yield
        finally:
            self.add(name, track, start, time.time_ns() // 1000, **args)

    def add(self, name: str, track: str, start_us: int, end_us: int, **args: Any) -> None:
        if self._fd is not None:
            event = {"name": name, "cat": track, "id": f"{self._pid}.{next(self._ids)}"}
            self._write(**event, ph="b", ts=start_us, args=args)
            self._write(**event, ph="e", ts=end_us)

    def _write(self, **event: Any) -> None:
        assert self._fd is not None
        os.write(self._fd, json.dumps({**event, "pid": self._pid, "tid": self._pid}).encode() + b",\n")


NO_TRACE = Trace(None)
