"""Laws of running a pipeline, on real processes: what is done is not done again, whatever was killed on the way."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_mopd.errors import UserError
from megatron_mopd.pipeline.graph import load_pipeline
from megatron_mopd.pipeline.local import run_here
from megatron_mopd.pipeline.stage import run_stage
from megatron_mopd.pipeline.stamps import Stamps
from megatron_mopd.pipeline.table import status
from megatron_mopd.run_lock import locked

ROOT = Path(__file__).parents[2]
MAKE = """\
import pathlib, sys, time
product, seconds = pathlib.Path(sys.argv[1]), float(sys.argv[2])
product.mkdir(exist_ok=True)
with (product / "starts").open("a") as file:
    file.write(f"{time.time()}\\n")
time.sleep(seconds)
(product / "ends").write_text(f"{time.time()}\\n")
"""
"""Makes a folder, in so many seconds, and says in it how often it was started."""


class World:
    """A pipeline file in a folder of its own, and `mopd pipeline` as a user calls it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "pipeline.yaml"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "make.py").write_text(MAKE)

    def write(self, *stages: dict[str, Any], **fields: Any) -> None:
        self.file.write_text(yaml.safe_dump({"folder": str(self.folder / "run"), "stages": list(stages)} | fields))

    def stage(self, name: str, *needs: str, seconds: float = 0.0, **fields: Any) -> dict[str, Any]:
        command = ["python", str(self.folder / "make.py"), f"$folder/{name}", str(seconds)]
        return {"name": name, "needs": list(needs), "command": command, "produces": f"$folder/{name}"} | fields

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "megatron_mopd.cli", "pipeline", str(self.file), *words]
        return subprocess.Popen(
            command,
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"COLUMNS": "200"},
        )

    def __call__(self, *words: str) -> tuple[int, str, str]:
        process = self.start(*words)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err

    def make(self) -> list[int]:
        """Every stage as `--stage` makes it, in this process: an interpreter's start costs more than all the rest."""
        pipeline = load_pipeline(self.file)
        return [run_stage(pipeline, stage) for stage in pipeline.ordered]

    def starts(self, name: str) -> int:
        file = self.folder / "run" / name / "starts"
        return len(file.read_text().splitlines()) if file.is_file() else 0

    def states(self) -> dict[str, str]:
        return {line.stage.name: line.state for line in status(load_pipeline(self.file))}

    def wait_for(self, name: str) -> None:
        deadline = time.monotonic() + 60
        while not self.starts(name):
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def processes(self) -> dict[int, str]:
        """Those that name the folder: the runner, its stages, their commands."""
        found = {}
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = file.read_bytes().decode(errors="replace")
            except OSError:  # it has just ended
                continue
            if str(self.folder) in words:
                found[int(file.parent.name)] = words
        return found

    def assert_nothing_is_left(self) -> None:
        deadline = time.monotonic() + 30
        while self.processes():
            assert time.monotonic() < deadline, self.processes()
            time.sleep(0.05)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield World(tmp_path)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_rerun_does_nothing_and_says_so(world: World) -> None:
    world.write(world.stage("a"), world.stage("b", "a"))
    code, out, err = world()
    assert (code, err) == (0, "")
    assert "2 of 2 stages done" in out
    before = {f: f.stat().st_mtime_ns for f in (world.folder / "run").rglob("*") if f.name != ".lock"}
    code, out, _ = world()
    assert code == 0
    assert "started" not in out
    assert len(re.findall(r"│ done +│", out)) == 2
    assert {f: f.stat().st_mtime_ns for f in (world.folder / "run").rglob("*") if f.name != ".lock"} == before


def test_a_changed_input_makes_its_stage_again_and_those_after_it(world: World) -> None:
    """What they had made is kept aside; a stage that depends on none of it is left alone."""
    data = world.folder / "data"
    data.write_text("1")
    world.write(world.stage("a", inputs=[str(data)]), world.stage("b", "a"), world.stage("c"))
    assert world.make() == [0, 0, 0]
    data.write_text("2")
    assert world.states() == {"a": "out of date", "b": "out of date", "c": "done"}
    assert world.make() == [0, 0, 0]
    assert world.states() == dict.fromkeys("abc", "done")
    assert [world.starts(name) for name in "abc"] == [1, 1, 1]  # of new folders
    assert sorted(f.name for f in (world.folder / "run/pipeline/replaced").iterdir()) == ["a.0", "b.0"]


@pytest.mark.parametrize("change", ["word", "file of the command", "file of an option", "product is gone"])
def test_what_else_makes_a_stage_again(world: World, change: str) -> None:
    """An option may name files: a.b=FILE, a.b=[FILE, FILE]."""
    option = world.folder / "prompts.jsonl"
    option.write_text("{}")
    stage = world.stage("a")
    world.write({**stage, "command": [*stage["command"], f"prompts.files=[{option}, nowhere]"]})
    pipeline = load_pipeline(world.file)
    assert world.make() == [0]
    if change == "word":
        world.write(world.stage("a", seconds=0.001))
    elif change == "file of the command":
        (world.folder / "make.py").write_text(MAKE + "\n")
    elif change == "file of an option":
        option.write_text("{ }")
    else:
        shutil.rmtree(world.folder / "run/a")
    assert Stamps(load_pipeline(world.file)).done() == set()
    assert world.make() == [0]
    assert Stamps(load_pipeline(world.file)).done() == {"a"}
    assert (world.folder / "run/pipeline/replaced").exists() == (change != "product is gone")
    assert pipeline.by_name.keys() == {"a"}


def test_a_need_that_is_made_again_makes_what_follows_again(world: World) -> None:
    world.write(world.stage("a"), world.stage("b", "a"))
    assert world.make() == [0, 0]
    shutil.rmtree(world.folder / "run/a")
    assert world.states() == {"a": "out of date", "b": "out of date"}
    assert world.make() == [0, 0]
    assert (world.folder / "run/pipeline/replaced/b.0").is_dir()


def test_a_failed_stage_stops_what_needs_it_and_nothing_else(world: World) -> None:
    fails = world.stage("bad", command=["python", "-c", "print(*range(99), sep=chr(10)); raise SystemExit(3)"])
    lies = world.stage("lies", command=["true"])
    after = (world.stage("after", "bad"), world.stage("far", "after", "good"))
    world.write(fails, lies, *after, world.stage("good", seconds=0.5), max_parallel=3)
    code, out, err = world()
    assert code == 1
    log = world.folder / "run/logs/bad.log"
    assert f"stage bad ended with exit code 3; the end of {log}:\n    87\n" in err
    assert err.count("    98\n") == 1
    assert f"stage lies ended well, without making {world.folder}/run/lies" in err
    assert world.states() == {
        "bad": "failed", "lies": "failed", "after": "not begun", "good": "done", "far": "not begun"
    }  # fmt: skip
    assert re.search(r"after +│ not begun +│.*waits for bad", out)
    assert json.loads((world.folder / "run/pipeline/bad.json").read_text())["code"] == 3
    assert world("--stage", "after")[0] == 2


def test_a_stage_that_failed_is_tried_again_where_it_stopped(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """Under the same key nothing is cleared: the command goes on from what it has left."""
    world.write(world.stage("a", command=["python", "-c", "import pathlib; pathlib.Path('$folder/a').mkdir(); 1 / 0"]))
    assert world.make() == [1]
    (world.folder / "run/a/checkpoint").touch()
    assert world.make() == [1]
    assert "FileExistsError" in capsys.readouterr().err
    assert (world.folder / "run/a/checkpoint").exists()


MEET = """\
import pathlib, sys, time
mine = pathlib.Path(sys.argv[1])
other = mine.with_name(sys.argv[2])
mine.mkdir()
while not other.exists():
    time.sleep(0.02)
"""


def test_independent_stages_run_side_by_side_and_the_longest_chain_goes_first(world: World) -> None:
    """Two that wait for each other end only if they run at once."""

    def meeting(name: str, other: str) -> dict[str, Any]:
        return world.stage(name, command=["python", "-c", MEET, f"$folder/{name}", other])

    chain = [meeting("x1", "y"), world.stage("x2", "x1"), world.stage("x3", "x2")]
    world.write(meeting("y", "x1"), world.stage("z"), *chain, max_parallel=2)
    code, out, _ = world()
    assert code == 0
    assert re.findall(r"(\w+): started", out)[:2] == ["x1", "y"]


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("runner", signal.SIGINT),
        ("runner", signal.SIGTERM),
        ("runner", signal.SIGKILL),
        ("stage", signal.SIGKILL),
        ("command", signal.SIGKILL),
    ],
)
def test_whoever_is_ended_nothing_stays_and_a_rerun_goes_on(world: World, victim: str, number: signal.Signals) -> None:
    world.write(world.stage("a"), world.stage("b", "a", seconds=60))
    pipeline = load_pipeline(world.file)
    assert run_stage(pipeline, pipeline.stage("a")) == 0
    process = world.start()
    world.wait_for("b")
    marks = {"runner": "pipeline.yaml\0", "stage": "--stage\0b", "command": "make.py"}
    of = {n: [p for p, words in world.processes().items() if mark in words] for n, mark in marks.items()}
    of["runner"] = [process.pid]
    (pid,) = of[victim]
    os.kill(pid, number)
    code = process.wait(timeout=60)
    process.communicate()
    assert code == {"runner": -9 if number == signal.SIGKILL else 128 + number}.get(victim, 1)
    world.assert_nothing_is_left()
    assert world.states() == {"a": "done", "b": "failed" if victim == "command" else "interrupted"}
    world.write(world.stage("a"), world.stage("b", "a", seconds=0.0))  # another key, so that it ends soon
    assert world.make() == [0, 0]
    assert world.starts("a") == 1


SLOW_TO_END = """\
import pathlib, signal, sys, time
product = pathlib.Path(sys.argv[1])
again = product.exists()
product.mkdir(exist_ok=True)
def end(*_):
    time.sleep(1.5)
    (product / "ended").touch()
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
(product / "starts").touch()
if again:
    sys.exit(0 if (product / "ended").exists() else 7)
time.sleep(60)
"""


def test_a_command_whose_stage_was_killed_keeps_the_next_one_out_until_it_has_ended(world: World) -> None:
    world.write(world.stage("a", command=["python", "-c", SLOW_TO_END, "$folder/a"]))
    process = world.start("--stage", "a")
    while not (world.folder / "run/a/starts").is_file():
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.communicate(timeout=30)
    assert world.states() == {"a": "running"}
    assert world.make() == [0]
    world.assert_nothing_is_left()


def test_a_pipeline_may_be_a_stage_of_another(world: World, tmp_path: Path) -> None:
    """Several seeds of one, say. Ended from outside, it goes on inside."""
    inner = World(tmp_path / "inner")
    inner.write(inner.stage("a"), inner.stage("b", "a", seconds=2.0), folder=str(tmp_path / "run/n"))
    world.write(world.stage("n", command=["mopd", "pipeline", str(inner.file)]))
    process = world.start()
    while not (tmp_path / "run/n/b/starts").is_file():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    world.assert_nothing_is_left()
    assert world.make() == [0]
    assert [len((tmp_path / "run/n" / name / "starts").read_text().splitlines()) for name in "ab"] == [1, 2]


def test_a_stage_waits_for_the_one_that_is_at_work_and_then_finds_it_done(world: World) -> None:
    world.write(world.stage("a", seconds=1.0))
    first = world.start("--stage", "a")
    world.wait_for("a")
    assert world.states() == {"a": "running"}
    assert world("--stage", "a") == (0, "", "")
    assert first.wait(timeout=10) == 0
    first.communicate()
    assert world.starts("a") == 1


def test_what_the_pipeline_has_not_made_is_not_touched(world: World) -> None:
    world.write(world.stage("a"))
    (world.folder / "run/a").mkdir(parents=True)
    with pytest.raises(UserError, match="run/a is there, and this pipeline has not made it; move it away"):
        world.make()
    assert world.starts("a") == 0


def test_two_runners_are_one_too_many(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_mopd.pipeline.local.locked", partial(locked, wait_s=0.1))
    world.write(world.stage("a"))
    with locked(world.folder / "run/pipeline"), pytest.raises(UserError, match="another run is at work in"):
        run_here(load_pipeline(world.file), [str(world.file)], print)


@pytest.mark.parametrize("state", ["begun", "cleared"])
def test_a_kill_between_any_two_writes_leaves_a_record_to_go_on_from(world: World, state: str) -> None:
    """Older products are out of the way before a record says so."""
    world.write(world.stage("a"))
    assert world.make() == [0]
    world.write(world.stage("a", seconds=0.001))
    stamps = Stamps(pipeline := load_pipeline(world.file))
    (a,) = pipeline.stages
    key = stamps.key(a)
    old = json.loads((world.folder / "run/pipeline/a.json").read_text())
    (world.folder / "run/pipeline/a.json").write_text(
        json.dumps(old | {"key": key, "state": "begun", "ended_at": None, "cleared": state == "cleared"})
    )
    stamps.begin(a)
    assert a.produces.exists() == (state == "cleared")
    assert stamps.done() == set()
