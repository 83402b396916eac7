"""The log-prob head against the bare products that it cannot do without, and against other ways to do it.

    python tools/bench_head.py [--shape T,D,V ...] [--methods ours,mcore,...] [--rounds 5] [--out FOLDER]
    torchrun --nproc-per-node 2 tools/bench_head.py ...            the vocabulary cut over two ranks; NCCL on GPUs

All methods (tools/head_methods.py) take turns in one process. Of each: the ratio of its time to that of the three
products in the same round, the median of them (processor time on a CPU, which other processes change less, and events
on a GPU); the peak of its memory beyond inputs and outputs, in units of a chunk's logits in the model's dtype; and the
collectives of a call. On a smaller problem with logits as a language model has them (up to about 30): errors against
float64, and what they do to the reward of a student that is close to its teacher.
FOLDER gets head.csv and head.svg.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist
from head_methods import METHODS, Answer, Problem
from torch import Tensor

from megatron_mopd.cli import guarded
from megatron_mopd.errors import UserError
from megatron_mopd.mcore import device, parallel
from megatron_mopd.mcore.layout import Layout

SHAPES = ("1024,1024,32768", "1024,1024,151936", "4096,512,32768")
SMALL = (256, 512, 16384)
COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")


@dataclass
class Row:
    """What was measured of a method; errors are relative but for the log-prob's."""

    shape: str
    tp: int
    method: str
    ratio: float
    seconds: float
    scratch: float
    collectives: int
    logprob_error: float = 0.0
    hidden_error: float = 0.0
    weight_error: float = 0.0
    reward_error: float = 0.0
    sign_flips: float = 0.0


def problem(T: int, D: int, V: int, chunk: int, block: int) -> tuple[Problem, Tensor]:
    """Hidden states that point at the target, and at four other tokens; also the whole weight."""
    g = torch.Generator().manual_seed(0)
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    weight_VD = torch.randn(V, D, generator=g) / D**0.5
    target_T = torch.randint(V, (T,), generator=g)
    hidden_TD = 1.5 * torch.randn(T, D, generator=g) + (10 + 20 * torch.rand(T, 1, generator=g)) * weight_VD[target_T]
    for _ in range(4):
        hidden_TD += (12 + 14 * torch.rand(T, 1, generator=g)) * weight_VD[torch.randint(V, (T,), generator=g)]
    hidden_TD, weight_VD, target_T = (
        x.to(device.DEVICE) for x in (hidden_TD.bfloat16(), weight_VD.bfloat16(), target_T)
    )
    v = V // size
    teacher_T = -3 * torch.rand(T, generator=g).to(device.DEVICE)
    mine_vD = weight_VD[rank * v : (rank + 1) * v].clone()
    return Problem(hidden_TD, mine_vD, target_T, teacher_T, rank * v, group, min(chunk, T), block), weight_VD


def measure(shape: str, methods: list[str], rounds: int, chunk: int, block: int) -> list[Row]:
    T, D, V = (int(x) for x in shape.split(","))
    if V % (size := dist.get_world_size()):
        raise UserError(f"--shape {shape}: {size} ranks cannot share {V} tokens; choose a multiple")
    p, _ = problem(T, D, V, chunk, block)
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for number in range(rounds + 1):
        for name in methods:
            dist.barrier()
            taken = timed(METHODS[name], p)
            if number:  # the first round warms up
                seconds[name].append(taken)
    unit = p.chunk * len(p.weight_vD) * p.weight_vD.element_size()
    rows = []
    for name in methods:
        ratio = statistics.median(x / y for x, y in zip(seconds[name], seconds["floor"], strict=True))
        with counted() as calls:
            scratch = peak_scratch(METHODS[name], p)
        rows.append(Row(shape, size, name, ratio, min(seconds[name]), scratch / unit, len(calls)))
    return rows


def timed(method: Callable[[Problem], Answer], p: Problem) -> float:
    if not device.HAS_GPU:
        start = time.process_time()
        method(p)
        return time.process_time() - start
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    method(p)
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1e3


def peak_scratch(method: Callable[[Problem], Answer], p: Problem) -> int:
    """Bytes beyond what is there before and what is returned: of the allocator on a GPU, of the process on a CPU."""
    if device.HAS_GPU:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        answer = method(p)
        peak = torch.cuda.max_memory_allocated()
    else:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
        before = _status("VmRSS")
        answer = method(p)
        peak = _status("VmHWM")
    return peak - before - sum(x.nbytes for x in answer if x is not None)


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


@contextmanager
def counted() -> Iterator[list[str]]:
    """The collectives that are called within."""
    calls: list[str] = []
    upstream = {name: getattr(dist, name) for name in COLLECTIVES}

    def counting(name: str) -> Callable:
        def call(*args, **kwargs):
            calls.append(name)
            return upstream[name](*args, **kwargs)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, counting(name))
    try:
        yield calls
    finally:
        for name, function in upstream.items():
            setattr(dist, name, function)


def add_errors(rows: list[Row], chunk: int, block: int) -> None:
    """Of the small problem, with a teacher whose log-probs differ by about 0.05."""
    p, weight_VD = problem(*SMALL, chunk, block)
    hidden_TD, weight_VD = p.hidden_TD.double().requires_grad_(), weight_VD.double().requires_grad_()
    logprobs_T = (hidden_TD @ weight_VD.t()).log_softmax(-1).gather(1, p.target_T[:, None])[:, 0]
    noise_T = torch.randn(len(logprobs_T), generator=torch.Generator().manual_seed(1)).to(device.DEVICE)
    p = p._replace(teacher_T=logprobs_T.detach() + 0.05 * noise_T)
    (p.all_coefficients(logprobs_T.detach()) * logprobs_T).sum().backward()
    assert hidden_TD.grad is not None
    assert weight_VD.grad is not None
    mine_vD = weight_VD.grad[p.vocab_start : p.vocab_start + len(p.weight_vD)]
    for row in rows:
        if row.method == "floor":
            continue
        got_T, got_hidden, got_weight = METHODS[row.method](p)
        reward_T, true_T = p.teacher_T - got_T, p.teacher_T - logprobs_T.detach()
        row.logprob_error = float((got_T - logprobs_T.detach()).abs().max())
        row.hidden_error, row.weight_error = _relative(got_hidden, hidden_TD.grad), _relative(got_weight, mine_vD)
        row.reward_error = _relative(reward_T, true_T)
        row.sign_flips = float((reward_T * true_T < 0).double().mean())


def _relative(got: Tensor | None, want: Tensor) -> float:
    assert got is not None
    return float((got.double() - want).norm() / want.norm())


def table(rows: list[Row]) -> str:
    names = "".join(f"{name:>9}" for name in ("ratio", "s", "scratch", "coll.", "log p", "dH", "dW", "reward", "flips"))
    head, lines = f"{'method':15}{names}", []
    for r in rows:
        errors = "".join(f"{x:9.1e}" for x in (r.logprob_error, r.hidden_error, r.weight_error, r.reward_error))
        measured = f"{r.ratio:9.2f}{r.seconds:9.3f}{r.scratch:9.2f}{r.collectives:9}"
        lines.append(f"{r.method:15}{measured}{errors}{r.sign_flips:9.1%}")
    return "\n".join([f"T, D, V = {rows[0].shape}, tp {rows[0].tp}, {device.DEVICE}", head, *lines])


def write(rows: list[Row], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "head.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    (folder / "head.svg").write_text(bars(rows))


def bars(rows: list[Row]) -> str:
    """A bar for each ratio; the line is the floor."""
    height, unit = 18, 160
    parts = []
    for i, r in enumerate(rows):
        y, label = 10 + i * height, f"{r.shape} tp{r.tp} {r.method}"
        parts.append(f'<text x="230" y="{y + 12}" text-anchor="end">{label}</text>')
        parts.append(f'<rect x="240" y="{y}" width="{r.ratio * unit:.0f}" height="{height - 4}" fill="#4878a8"/>')
        parts.append(f'<text x="{246 + r.ratio * unit:.0f}" y="{y + 12}">{r.ratio:.2f}</text>')
    end = 20 + len(rows) * height
    parts.append(f'<line x1="{240 + unit}" y1="0" x2="{240 + unit}" y2="{end}" stroke="#c03030"/>')
    size = f'width="{300 + int(max(r.ratio for r in rows) * unit)}" height="{end}"'
    style = 'font-family="sans-serif" font-size="11"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', *parts, "</svg>\n"])


def bench(arguments: argparse.Namespace) -> int:
    methods = ["floor", *(name for name in arguments.methods.split(",") if name != "floor")]
    if unknown := set(methods) - METHODS.keys():
        raise UserError(f"--methods {','.join(sorted(unknown))}: unknown; choose from {', '.join(METHODS)}")
    parallel.init_distributed(600.0)
    parallel.initialize_parallel(Layout.from_table({"tensor_model_parallel_size": dist.get_world_size()}), seed=0)
    rows = []
    for shape in arguments.shape:
        found = measure(shape, methods, arguments.rounds, arguments.chunk, arguments.block)
        add_errors(found, arguments.chunk, arguments.block)
        if dist.get_rank() == 0:
            print(table(found), flush=True)
        rows += found
    if arguments.out is not None and dist.get_rank() == 0:
        write(rows, arguments.out)
    parallel.shutdown()
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=SHAPES, metavar="T,D,V")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunk", type=int, default=4096 if device.HAS_GPU else 1024)
    parser.add_argument("--block", type=int, default=1 << 15 if device.HAS_GPU else 256)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1 if not device.HAS_GPU else torch.get_num_threads())
    sys.exit(guarded(lambda: bench(arguments), rank=0))
