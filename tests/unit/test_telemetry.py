"""Laws of the record, the rows, the sinks and the display: logging never changes, delays or ends a run."""

from __future__ import annotations

import importlib
import io
import json
import math
import os
import pty
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from megatron_mopd.config import Config
from megatron_mopd.errors import UserError
from megatron_mopd.step_metrics import NOTHING, CellMetrics, Mean, StepMetrics, WeightBytes
from megatron_mopd.telemetry import sinks
from megatron_mopd.telemetry.display import Display, sparkline
from megatron_mopd.telemetry.record import Record, read_record
from megatron_mopd.telemetry.redact import REDACTED, redact
from megatron_mopd.telemetry.registry import CELL_METRICS, RUN_METRICS, cell_key, check_row, metric_of, split_cell_key
from megatron_mopd.telemetry.row import step_row
from megatron_mopd.telemetry.run_log import RunLog
from megatron_mopd.telemetry.sinks import GuardedSink, TensorBoardSink, check_sinks
from megatron_mopd.types import Cell

CELLS = [Cell("general", "low"), Cell("general", "max")]
SECRET = "planted-secret-4f7a91"
SECONDS = {"wait": 0.7, "update": 0.2, "sync": 0.05, "step": 1.0}


def learner_metrics(step: int) -> StepMetrics:
    quarters = tuple(Mean(1e-7 * i, 10) for i in range(3)), (Mean(8e-7, 2), *(NOTHING,) * 2, Mean(6e-7, 8))
    low = CellMetrics(3, 30, 0.4 / step, 0.1, 0.9, Mean(1e-7, 30), 3e-7, 1)
    high = CellMetrics(1, 10, 0.8 / step, 0.3, 1.7, Mean(5e-7, 8), 9e-7, 0)
    low = replace(low, mismatch_kl=Mean(2e-9, 30), mismatch_quarters=(*quarters[0], NOTHING))
    high = replace(high, mismatch_kl=Mean(6e-9, 8), mismatch_quarters=quarters[1])
    low, high = replace(low, route_agreement=Mean(0.9, 300)), replace(high, route_agreement=Mean(0.5, 100))
    low = replace(low, logit_grad_norm=0.6, weight=1.25, reverse_kl_deciles=(Mean(0.4 / step, 3),) * 10)
    high = replace(high, logit_grad_norm=0.8, weight=0.5, reverse_kl_deciles=(Mean(1.6 / step, 5), *(NOTHING,) * 9))
    return StepMetrics(step, -0.1 / 3, 0.7, 4e-3, 200, 2, dict(zip(CELLS, (low, high), strict=True)))


def rollout_metrics() -> dict:
    low = {
        "reward": 1.0,
        "reward_within_budget": 0.5,
        "spent_tokens": 2.0,
        "response_tokens": 4.0,
        "truncated_fraction": 0.0,
    }
    high = {
        "reward": 0.0,
        "reward_within_budget": 0.0,
        "spent_tokens": 8.0,
        "response_tokens": 9.0,
        "truncated_fraction": 1.0,
    }
    cells = {"general/low": {"trajectories": 3, **low}, "general/max": {"trajectories": 1, **high}}
    return {"cells": cells, "staleness": 0.0, "unscored": 0, "seconds": {"load": 0.1, "sample": 0.4, "score": 0.1}}


def sync_of(metrics: StepMetrics) -> dict[str, float]:
    row = step_row(metrics, rollout_metrics(), SECONDS)
    return {key: value for key, value in row.items() if key.startswith("sync/")}


def row_of(step: int) -> dict[str, float]:
    return step_row(learner_metrics(step), rollout_metrics(), SECONDS)


def config_of(folder: Path, **telemetry: object) -> Config:
    return Config.model_validate(
        {
            "run": {"folder": str(folder), "num_steps": 5},
            "student": {"checkpoint": "student"},
            "prompts": {
                "files": ["p.jsonl"],
                "batch_size": 4,
                "mixture": {"general": 1},
                "efforts": {"low": 1, "max": 1},
            },
            "environments": {},
            "rollout": {"max_response_tokens": 8},
            "telemetry": {"display": False, **telemetry},
            "sglang": {"server": {"api_key": SECRET, "url": f"http://user:{SECRET}@host:1"}},
        }
    )


class TestRow:
    def test_means_weight_cells_by_what_they_hold(self) -> None:
        row = row_of(1)
        assert row["train/reverse_kl"] == pytest.approx((30 * 0.4 + 10 * 0.8) / 40)
        assert row["train/mismatch_max"] == 9e-7
        assert row["train/mismatch_kl"] == pytest.approx((30 * 2e-9 + 8 * 6e-9) / 38)
        assert row["train/mismatch_quarter_1"] == pytest.approx((10 * 0 + 2 * 8e-7) / 12)
        assert row["train/mismatch_quarter_2"] == pytest.approx(1e-7)
        assert row["train/mismatch_quarter_4"] == pytest.approx(6e-7)
        assert row["train/route_agreement"] == pytest.approx((300 * 0.9 + 100 * 0.5) / 400)
        assert row["cell/general/max/mismatch_kl"] == 6e-9
        assert row["cell/general/low/route_agreement"] == 0.9
        assert row["train/masked_tokens"] == 1
        assert row["rollout/spent_tokens"] == pytest.approx((3 * 2 + 8) / 4)
        assert row["train/reverse_kl_decile_1"] == pytest.approx((3 * 0.4 + 5 * 1.6) / 8)
        assert row["train/reverse_kl_decile_2"] == pytest.approx(0.4)
        assert row["train/logit_grad_norm"] == pytest.approx(1.0)
        assert row["cell/general/max/reward_within_budget"] == 0.0
        assert row["perf/tokens_per_s"] == 200
        assert row["time/sample_s"] == 0.4

    def test_shares_of_the_cells_sum_to_one(self) -> None:
        row = row_of(1)
        want = {"prompt_share": 3 / 4, "token_share": 30 / 40, "clipped_share": 3 / 6, "grad_share": 0.36}
        for name, share in want.items():
            assert row[f"cell/general/low/{name}"] == pytest.approx(share)
            assert row[f"cell/general/low/{name}"] + row[f"cell/general/max/{name}"] == pytest.approx(1)
        assert row["cell/general/low/weight"] == 1.25
        one = replace(learner_metrics(1), cells={CELLS[0]: learner_metrics(1).cells[CELLS[0]]})
        alone = step_row(one, rollout_metrics(), SECONDS)
        assert [alone[f"cell/general/low/{name}"] for name in want] == [1.0] * 4

    def test_what_the_batch_has_nothing_of_has_no_shares(self) -> None:
        cells = {c: replace(m, clip_fraction=0.0, logit_grad_norm=0.0) for c, m in learner_metrics(1).cells.items()}
        row = step_row(replace(learner_metrics(1), cells=cells), rollout_metrics(), SECONDS)
        assert not [key for key in row if key.endswith(("clipped_share", "grad_share"))]
        assert row["train/logit_grad_norm"] == 0

    def test_row_does_not_depend_on_the_order_in_which_the_driver_met_the_cells(self) -> None:
        rollout = rollout_metrics()
        rollout["cells"]["general/mid"] = {**rollout["cells"]["general/low"], "spent_tokens": 0.1}
        turned = {**rollout, "cells": dict(reversed(rollout["cells"].items()))}
        assert step_row(learner_metrics(1), rollout, SECONDS) == step_row(learner_metrics(1), turned, SECONDS)

    def test_what_nothing_was_measured_for_is_absent(self) -> None:
        full = learner_metrics(1)
        empty = replace(full, cells={**full.cells, CELLS[1]: CellMetrics(1, 0, 0.0, 0.0, 0.0, NOTHING, 0.0, 10)})
        row = step_row(empty, rollout_metrics(), SECONDS)
        assert not [key for key in row if key.startswith(("cell/general/max/reverse_kl", "cell/general/max/mismatch"))]
        assert "cell/general/max/route_agreement" not in row
        assert "cell/general/low/mismatch_quarter_4" not in row
        assert "cell/general/low/reverse_kl_decile_10" in row
        assert "cell/general/max/reverse_kl_decile_2" not in row_of(1)
        stale = {cell: replace(m, mismatch=NOTHING, mismatch_kl=NOTHING) for cell, m in full.cells.items()}
        without = row_of(1).keys() - step_row(replace(full, cells=stale), rollout_metrics(), SECONDS).keys()
        assert {"train/mismatch_mean", "train/mismatch_max", "cell/general/low/mismatch_kl"} < without
        outcomes = step_row(replace(full, has_teacher=False), rollout_metrics(), SECONDS)
        assert not [key for key in outcomes if "reverse_kl" in key or "clip_fraction" in key or "masked" in key]
        assert {"train/mismatch_mean", "rollout/reward", "cell/general/low/mismatch_mean"} <= outcomes.keys()
        demonstrations = step_row(full, None, SECONDS)
        assert "train/loss" in demonstrations
        assert not [key for key in demonstrations if "reverse_kl" in key or key.startswith(("rollout/", "sync/"))]

    def test_a_packed_size_is_of_what_is_quantized(self) -> None:
        plain, quantized = (replace(learner_metrics(1), weight_bytes=WeightBytes(800, n)) for n in (800, 300))
        sizes = {"sync/bytes": 800.0}
        assert sync_of(plain) == sizes
        assert sync_of(quantized) == sizes | {"sync/packed_bytes": 300.0}
        assert sync_of(learner_metrics(1)) == {}

    def test_budgets_and_ratios_are_of_what_has_them(self) -> None:
        rollout, metrics = rollout_metrics(), learner_metrics(1)
        rollout["cells"]["general/low"] |= {"over_budget": 0.25, "tau": 0.34}
        clipped = replace(metrics.cells[CELLS[0]], ratio_clipped=Mean(0.5, 30))
        row = step_row(replace(metrics, cells={**metrics.cells, CELLS[0]: clipped}), rollout, SECONDS)
        assert (row["rollout/over_budget"], row["cell/general/low/tau"]) == (0.25, 0.34)
        assert row["train/ratio_clipped"] == row["cell/general/low/ratio_clipped"] == 0.5
        absent = ("cell/general/max/over_budget", "rollout/training_reward", "train/ratio_masked", "rollout/tau")
        assert not set(absent) & row.keys()

    def test_every_key_is_registered_with_its_meaning(self) -> None:
        for key in row_of(1):
            assert metric_of(key).meaning
        assert all(m.name == name for table in (RUN_METRICS, CELL_METRICS) for name, m in table.items())

    @pytest.mark.parametrize("key", ["train/los", "cell/general/low/rewards", "loss"])
    def test_unregistered_key_is_refused(self, key: str) -> None:
        with pytest.raises(AssertionError, match=f"{key} is not in the metric registry"):
            check_row([key])

    def test_cell_keys_read_back(self) -> None:
        for cell in (Cell("general", "low"), Cell("math/algebra", "max")):
            assert split_cell_key(cell_key(cell, "reward")) == (cell, "reward")
        assert split_cell_key("train/loss") is None


class TestRecord:
    def write(self, folder: Path, first: int, last: int, speed: float = 1.0) -> None:
        record = Record(folder, first)
        for step in range(first, last + 1):
            seconds = {name: value * speed for name, value in SECONDS.items()}
            record.append(step, step_row(learner_metrics(step), rollout_metrics(), seconds))
        record.close()

    def test_resumed_record_equals_that_of_a_run_that_never_stopped(self, tmp_path: Path) -> None:
        for name in ("whole", "stopped"):
            (tmp_path / name).mkdir()
        self.write(tmp_path / "whole", 1, 9)
        self.write(tmp_path / "stopped", 1, 7)
        with (tmp_path / "stopped" / "metrics.jsonl").open("a") as file:
            file.write('{"step": 8, "metr')  # killed in the middle of a line
        self.write(tmp_path / "stopped", 5, 9, speed=1.7)  # its last checkpoint was that of step 4
        whole, stopped = read_record(tmp_path / "whole"), read_record(tmp_path / "stopped")
        assert [row["step"] for row in stopped] == list(range(1, 10))
        assert [json.dumps(row["metrics"]) for row in whole] == [json.dumps(row["metrics"]) for row in stopped]
        assert whole[5]["timing"] != stopped[5]["timing"]

    def test_floats_keep_every_bit(self, tmp_path: Path) -> None:
        record = Record(tmp_path, 1)
        value = math.nextafter(0.1, 1.0)
        record.append(1, {"train/loss": value})
        record.close()
        assert read_record(tmp_path)[0]["metrics"]["train/loss"] == value

    def test_non_finite_number_is_null_in_strict_json(self, tmp_path: Path) -> None:
        record = Record(tmp_path, 1)
        record.append(1, {"train/loss": math.nan, "train/grad_norm": math.inf})
        record.close()
        line = json.loads(
            (tmp_path / "metrics.jsonl").read_text(), parse_constant=lambda c: pytest.fail(f"{c} in JSON")
        )
        assert line["metrics"] == {"train/loss": None, "train/grad_norm": None}

    def test_row_is_on_disk_before_append_returns(self, tmp_path: Path) -> None:
        record = Record(tmp_path, 1)
        record.append(1, row_of(1))
        assert len(read_record(tmp_path)) == 1
        record.close()

    def test_repeated_step_is_refused(self, tmp_path: Path) -> None:
        record = Record(tmp_path, 3)
        record.append(3, row_of(3))
        with pytest.raises(AssertionError, match="row of step 3 after the row of step 3"):
            record.append(3, row_of(3))
        record.close()

    def test_record_rejects_a_broken_line_with_its_number(self, tmp_path: Path) -> None:
        self.write(tmp_path, 1, 2)
        file = tmp_path / "metrics.jsonl"
        file.write_text(file.read_text().replace('{"step": 2', '{"st', 1))
        with pytest.raises(UserError, match=r"metrics\.jsonl:2 is not a row of metrics"):
            read_record(tmp_path)


class FaultySink:
    """Raises or blocks at its start, at the third row, or at its end."""

    name = "faulty"

    def __init__(self, fault: str, at: str) -> None:
        self.fault, self.at, self.rows, self.killed = fault, at, [], False
        self.release = threading.Event()

    def _reach(self, place: str) -> None:
        if place == self.at and self.fault == "raise":
            raise OSError("server is down\nwith a long page of HTML")
        if place == self.at:
            self.release.wait()

    def start(self) -> None:
        self._reach("start")

    def log(self, step: int, row: object) -> None:
        self._reach(f"row {step}")
        self.rows.append(step)

    def finish(self, failed: bool) -> None:
        self._reach("finish")

    def kill(self) -> None:
        self.killed = True
        self.release.set()


class TestSinks:
    @pytest.mark.parametrize("at", ["start", "row 3", "finish"])
    @pytest.mark.parametrize("fault", ["raise", "block"])
    def test_faulty_sink_costs_one_warning_and_a_bounded_time(
        self, fault: str, at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        warnings: list[str] = []
        faulty, good = FaultySink(fault, at), FaultySink("none", "")
        guarded = [
            GuardedSink(faulty, queue_rows=4, finish_timeout_s=0.5, warn=warnings.append),
            GuardedSink(good, warn=warnings.append),
        ]
        monkeypatch.setattr("megatron_mopd.telemetry.run_log.open_sinks", lambda config, next_step: guarded)
        start = time.monotonic()
        with RunLog(config_of(tmp_path), next_step=1) as log:
            for step in range(1, 13):
                log.step(learner_metrics(step), rollout_metrics(), SECONDS)
                time.sleep(0.002)
        assert time.monotonic() - start < 3
        assert len(warnings) == 1
        assert "faulty is off for the rest of this run" in warnings[0]
        assert "\n" not in warnings[0]
        assert faulty.killed
        assert good.rows == list(range(1, 13))
        assert [row["step"] for row in read_record(tmp_path)] == list(range(1, 13))

    def test_row_costs_training_next_to_nothing_while_a_sink_blocks(self) -> None:
        sink = GuardedSink(FaultySink("block", "start"), queue_rows=50, finish_timeout_s=0.1, warn=lambda text: None)
        start = time.monotonic()
        for step in range(1, 1001):
            sink.log(step, {})
        assert time.monotonic() - start < 0.5
        sink.finish()

    def test_tensorboard_reads_back_the_record(self, tmp_path: Path) -> None:
        accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        with RunLog(config_of(tmp_path, tensorboard=True), next_step=1) as log:
            for step in (1, 2, 3):
                log.step(learner_metrics(step), rollout_metrics(), SECONDS)
        events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        rows = read_record(tmp_path)
        assert set(events.Tags()["scalars"]) == {*rows[0]["metrics"], *rows[0]["timing"]}
        kl = [(e.step, e.value) for e in events.Scalars("train/reverse_kl")]
        assert kl == [(r["step"], pytest.approx(r["metrics"]["train/reverse_kl"])) for r in rows]

    def test_resumed_tensorboard_shows_each_step_once(self, tmp_path: Path) -> None:
        accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        for first, last in ((1, 4), (3, 5)):
            sink = GuardedSink(TensorBoardSink(tmp_path, first))
            for step in range(first, last + 1):
                sink.log(step, {"train/loss": 10.0 * first + step})
            sink.finish()
        events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
            (1, 11),
            (2, 12),
            (3, 33),
            (4, 34),
            (5, 35),
        ]

    @pytest.mark.parametrize(
        ("telemetry", "message"),
        [
            ({"tensorboard": True}, "telemetry.tensorboard needs the package tensorboard: pip install tensorboard"),
            ({"wandb": "offline"}, "telemetry.wandb needs the package wandb: pip install wandb"),
        ],
    )
    def test_missing_package_is_refused_at_start(
        self, telemetry: dict, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sinks.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(UserError, match=message):
            RunLog(config_of(tmp_path, **telemetry), next_step=1)

    def test_online_wandb_without_its_key_is_refused_at_start(self, tmp_path: Path) -> None:
        pytest.importorskip("wandb")
        with pytest.raises(UserError, match=r"telemetry\.wandb=online needs the environment variable WANDB_API_KEY"):
            check_sinks(config_of(tmp_path, wandb="online").telemetry, environment={})


class TestWandb:
    @pytest.fixture(autouse=True)
    def client(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("wandb")
        monkeypatch.setenv("WANDB_API_KEY", SECRET + "0" * 40)
        monkeypatch.delenv("WANDB_BASE_URL", raising=False)

    def run(self, folder: Path, first: int, last: int) -> None:
        with RunLog(config_of(folder, wandb="offline", tensorboard=True), next_step=first) as log:
            for step in range(first, last + 1):
                log.step(learner_metrics(step), rollout_metrics(), SECONDS)

    def test_offline_run_reads_back_the_record_and_resume_keeps_its_id(self, tmp_path: Path) -> None:
        self.run(tmp_path, 1, 3)
        (first,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
        rows = [{**row["metrics"], **row["timing"]} for row in read_record(tmp_path)]
        history = wandb_history(first)
        assert [item["_step"] for item in history] == [1, 2, 3]
        assert [{k: v for k, v in item.items() if not k.startswith("_")} for item in history] == rows

        self.run(tmp_path, 3, 4)
        ids = {file.stem for file in tmp_path.glob("wandb/offline-run-*/run-*.wandb")}
        assert ids == {first.stem}
        for file in (p for p in tmp_path.rglob("*") if p.is_file()):
            assert SECRET.encode() not in file.read_bytes(), file

    def test_killed_trainer_loses_no_row(self, tmp_path: Path) -> None:
        """The rows of an in-process client are lost on SIGKILL; the child process writes them out."""
        program = (
            "import os, signal, time\n"
            "from pathlib import Path\n"
            "from megatron_mopd.telemetry.wandb_sink import WandbSink\n"
            f"sink = WandbSink(Path({str(tmp_path)!r}), 'p', 'offline', {{}}, resumed=False)\n"
            "sink.start()\n"
            "for step in range(1, 51):\n"
            "    sink.log(step, {'train/loss': float(step)})\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == -signal.SIGKILL
        (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
        deadline = time.monotonic() + 30
        while not (kinds := wandb_kinds(file)).count("exit") and time.monotonic() < deadline:
            time.sleep(0.1)
        assert kinds.count("exit") == 1
        assert [item["_step"] for item in wandb_history(file)] == list(range(1, 51))

    def test_server_that_never_answers_does_not_hold_the_exit(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        warnings: list[str] = []
        with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, and says nothing
            monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
            sink = sinks._wandb_sink(config_of(tmp_path, wandb="online"), 1, os.environ)
            guarded = GuardedSink(sink, finish_timeout_s=4, warn=warnings.append)
            start = time.monotonic()
            guarded.log(1, row_of(1))
            guarded.finish()
        assert time.monotonic() - start < 8
        assert warnings == [
            "W&B is off for the rest of this run (it did not finish within 4 s); metrics.jsonl stays complete"
        ]

    def test_client_that_cannot_start_is_named_in_the_warning(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        warnings: list[str] = []
        monkeypatch.setenv("WANDB_BASE_URL", "not a url")
        sink = sinks._wandb_sink(config_of(tmp_path, wandb="online"), 1, os.environ)
        guarded = GuardedSink(sink, warn=warnings.append)
        guarded.finish()
        assert len(warnings) == 1
        assert "client.log" in warnings[0]


def wandb_records(file: Path) -> Iterator:
    """The records of a .wandb file: 7 bytes of header, then LevelDB frames (crc32, length, type) in 32 KiB blocks."""
    record_type = importlib.import_module("wandb.proto.wandb_internal_pb2").Record

    data, position, pending = file.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        crc, length, kind = struct.unpack("<IHB", data[position : position + 7])
        payload = data[position + 7 : position + 7 + length]
        if len(payload) < length:  # not written yet
            return
        assert crc == zlib.crc32(payload, zlib.crc32(bytes([kind])))
        position += 7 + length
        pending = payload if kind in (1, 2) else pending + payload
        if kind in (1, 4):
            record = record_type()
            record.ParseFromString(pending)
            yield record


def wandb_kinds(file: Path) -> list[str]:
    return [record.WhichOneof("record_type") for record in wandb_records(file)]


def wandb_history(file: Path) -> list[dict[str, float]]:
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in wandb_records(file)
        if record.WhichOneof("record_type") == "history"
    ]


class TestRedaction:
    def test_secrets_are_replaced_and_settings_are_not(self) -> None:
        tree = {
            "sglang": {"api_key": SECRET, "mem": 0.8, "hf_token": SECRET, "url": f"http://me:{SECRET}@host/x"},
            "options": [{"password": SECRET, "note": f"use {SECRET} here"}],
            "rollout": {"max_response_tokens": 24, "stop_token_ids": [1]},
            "learner": {"micro_batch_tokens": 16384, "tokenizer": "t"},
        }
        clean = redact(tree, {"WANDB_API_KEY": SECRET, "SHORT_TOKEN": "1"})
        assert SECRET not in json.dumps(clean)
        assert clean["options"][0]["note"] == f"use {REDACTED} here"
        assert clean["sglang"]["url"] == f"http://{REDACTED}@host/x"
        assert (clean["rollout"], clean["learner"]) == (tree["rollout"], tree["learner"])


class TestDisplay:
    def test_without_a_terminal_there_is_one_plain_line_per_step(self) -> None:
        out = io.StringIO()
        with Display("run", 5, CELLS, console=Console(file=out, width=40)) as display:
            for step in (1, 2):
                display.update(step, row_of(step))
        first, second = out.getvalue().splitlines()
        assert first.startswith("step 1/5  eta 0:04  loss -0.0333  kl 0.5000")
        assert second.startswith("step 2/5")
        assert "\x1b" not in out.getvalue()

    def test_panel_shows_every_cell_within_80_columns(self) -> None:
        console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
        display = Display("run", 5, CELLS, live=False, console=console)
        display.update(1, row_of(1))
        console.file = out = io.StringIO()
        console.print(display)
        assert "general" in out.getvalue()
        assert "0.50 0.400" in out.getvalue()  # low: reward within budget, reverse KL
        assert max(map(len, out.getvalue().splitlines())) <= 80

    @pytest.mark.parametrize(
        "ending", ["raise ValueError('broken')", "os.kill(os.getpid(), signal.SIGINT); time.sleep(5)"]
    )
    def test_terminal_is_left_clean_by_an_exception_and_by_ctrl_c(self, ending: str) -> None:
        program = (
            "import os, signal, time\n"
            "from megatron_mopd.telemetry.display import Display\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored below a shell's background job
            "with Display('run', 5, []) as display:\n"
            "    display.update(1, {'time/step_s': 1.0, 'train/loss': 0.25})\n"
            "    print('a line of another part')\n"
            f"    {ending}\n"
        )
        code, text = run_in_terminal(program)
        assert code != 0
        assert "a line of another part" in text
        assert "step 1/5" in text
        assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is shown again
        assert text.rindex("Traceback") > text.rindex("step 1/5")

    def test_sparkline_ends_with_the_last_value(self) -> None:
        assert sparkline([3, 2, 1, 0], 9) == "█▆▃▁"
        assert sparkline([1.0] * 100 + [2.0], 10) == "▁" * 9 + "█"
        assert sparkline([math.nan], 5) == "▁"


def run_in_terminal(program: str) -> tuple[int, str]:
    """Run Python code on a pseudo-terminal; return its exit code and everything it wrote."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "90", "LINES": "40"}
    process = subprocess.Popen([sys.executable, "-c", program], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    chunks = []
    try:
        while chunk := os.read(ours, 65536):
            chunks.append(chunk)
    except OSError:  # Linux answers EIO once the last writer has gone
        pass
    os.close(ours)
    return process.wait(timeout=30), b"".join(chunks).decode()
