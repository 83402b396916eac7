"""The trace is readable whatever ended its writers, and says who did what when."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from megatron_mopd.telemetry.trace import NO_TRACE, Trace


def events(file: Path) -> list[dict]:
    return json.loads(file.read_text().removesuffix(",\n") + "]")


def test_two_processes_share_a_file_and_spans_may_overlap(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    driver = Trace(file, "driver")
    trainer = (
        "import sys; from megatron_mopd.telemetry import trace; trace.Trace(sys.argv[1], 't').add('update', 'x', 5, 9)"
    )
    subprocess.run([sys.executable, "-c", trainer, file], check=True)
    with driver.span("sample", "step"), driver.span("score", "lane a", tokens=7):
        pass
    driver.add("late", "step", 20, 30)
    found = events(file)
    assert {e["args"]["name"] for e in found if e["ph"] == "M"} == {"driver", "t"}
    begins = {e["name"]: e for e in found if e["ph"] == "b"}
    ends = {e["id"]: e["ts"] for e in found if e["ph"] == "e"}
    assert begins.keys() == {"update", "sample", "score", "late"}
    assert begins["score"]["args"] == {"tokens": 7}
    assert begins["score"]["cat"] == "lane a"
    assert ends[begins["update"]["id"]] == 9
    assert (
        begins["sample"]["ts"] <= begins["score"]["ts"] <= ends[begins["score"]["id"]] <= ends[begins["sample"]["id"]]
    )
    assert begins["update"]["pid"] != begins["sample"]["pid"]


def test_without_a_file_nothing_is_written() -> None:
    with NO_TRACE.span("a", "b"):
        pass
