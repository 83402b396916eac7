"""MXFP4 fake quantization against torchao's: to_mx and dequantize in eager mode, and against a copy.

    python tools/bench_quantize.py [--shape ROWS,COLUMNS] [--dtype bfloat16] [--rounds 7] [--out FOLDER]

Needs torchao (`make test` leaves it in .venv/oracles: PYTHONPATH=.venv/oracles).
All methods take turns in one process, on one thread. Of each: the processor time of the fastest call, which other
processes change less, the median over rounds of its ratio to eager torchao's, and gigabytes read and written a second.
All but the copy have to return the same values. FOLDER gets quantize.csv.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor
from torchao.prototype.mx_formats.mx_tensor import MXTensor, ScaleCalculationMode  # pyright: ignore[reportMissingImports]

from megatron_mopd.cli import guarded
from megatron_mopd.errors import UserError
from megatron_mopd.quantization import mxfp4_compiled
from megatron_mopd.quantization.formats import BLOCK, DTYPES, encode_mxfp4, fake_quantize

REFERENCE = "torchao to_mx + dequantize"
NAMED = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


@dataclass
class Row:
    method: str
    shape: str
    dtype: str
    milliseconds: float
    times_faster: float
    gigabytes_per_second: float


def torchao(weight: Tensor) -> Tensor:
    mx = MXTensor.to_mx(weight, torch.float4_e2m1fn_x2, BLOCK, scaling_mode=ScaleCalculationMode.EVEN)
    return mx.dequantize(weight.dtype)


def plain(weight: Tensor) -> Tensor:
    """Without the compiled kernel."""
    compiled, mxfp4_compiled.compiled = mxfp4_compiled.compiled, lambda: None
    try:
        return fake_quantize(weight)
    finally:
        mxfp4_compiled.compiled = compiled


def measure(weight: Tensor, rounds: int) -> list[Row]:
    methods: dict[str, Callable[[Tensor], Tensor]] = {
        REFERENCE: torchao,
        "fake_quantize, operations": plain,
        "fake_quantize": fake_quantize,
        "encode_mxfp4": lambda x: encode_mxfp4(x).packed,
        "clone": torch.clone,
    }
    want = methods[REFERENCE](weight)
    for name in ("fake_quantize, operations", "fake_quantize"):
        if not torch.equal(methods[name](weight), want):
            raise AssertionError(f"{name} differs from {REFERENCE}")
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(rounds):
        for name, method in methods.items():
            start = time.process_time()
            method(weight)
            seconds[name].append(time.process_time() - start)
    return [row(name, weight, times, seconds[REFERENCE]) for name, times in seconds.items()]


def row(name: str, weight: Tensor, times: list[float], reference: list[float]) -> Row:
    ratio = statistics.median(theirs / ours for theirs, ours in zip(reference, times, strict=True))
    shape, dtype = "x".join(map(str, weight.shape)), str(weight.dtype).removeprefix("torch.")
    moved = 2 * weight.nbytes if name != "encode_mxfp4" else weight.nbytes + weight.numel() * 17 // 32
    return Row(name, shape, dtype, round(1e3 * min(times), 2), round(ratio, 2), round(moved / min(times) / 1e9, 2))


def bench(arguments: argparse.Namespace) -> int:
    rows, columns = (int(x) for x in arguments.shape.split(","))
    if columns % BLOCK:
        raise UserError(f"--shape {arguments.shape}: columns must be a multiple of {BLOCK}")
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * 0.02
    found = measure(weight.to(NAMED[arguments.dtype]), arguments.rounds)
    print(f"{'method':30}{'ms':>10}{'times faster':>14}{'GB/s':>8}   {found[0].shape} {found[0].dtype}")
    for r in found:
        print(f"{r.method:30}{r.milliseconds:10.1f}{r.times_faster:14.2f}{r.gigabytes_per_second:8.2f}")
    if arguments.out is not None:
        write(found, arguments.out)
    return 0


def write(rows: list[Row], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "quantize.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="4096,4096", metavar="ROWS,COLUMNS")
    parser.add_argument("--dtype", default="bfloat16", choices=NAMED)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    torch.set_num_threads(1)
    sys.exit(guarded(lambda: bench(parser.parse_args())))
