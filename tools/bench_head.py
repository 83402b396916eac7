"""The log-prob head against the bare products that it cannot do without, and against other ways to do it.

    python tools/bench_head.py [--shape T,D,V ...] [--methods ours,mcore,...] [--rounds 5] [--out FOLDER]
    torchrun --nproc-per-node 2 tools/bench_head.py ...            the vocabulary cut over two ranks; NCCL on GPUs

All methods (tools/head_methods.py, tools/megatron_methods.py) take turns in one process. Of each: the ratio of its time
to that of the three products in the same round, the median over the rounds; the peak of its memory beyond inputs and
outputs, in units of a chunk's logits in the model's dtype; and the collectives of a call. The floor allocates its
results as every method does, so that fresh memory costs all of them the same.

On a smaller problem, errors against float64: with logits as a language model has them (up to about 30, four tokens that
compete with the target), and with `plain` ones where only the target stands out; and what they do to the reward of a
student that is close to its teacher. Rounding E to bfloat16 is seen with the former, where few entries make up a row.

FOLDER gets head.csv and head.svg; rows of other methods and shapes that are there stay. Needs torch alone; without
megatron-core its rows are left out, which is said.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from head_measures import HAS_GPU, counted, peak_scratch, timed
from head_methods import METHODS, Problem
from head_parts import parts
from head_report import Row, table, write
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from megatron_mopd.errors import UserError
from megatron_mopd.mcore.vocab_slice import block_of, chunk_of

SHAPES = ("1024,1024,32768", "1024,1024,151936", "4096,512,32768")
SMALL = (256, 512, 16384)
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if HAS_GPU else torch.device("cpu")
OF_MEGATRON = ("mcore", "mcore_fused")


def problem(T: int, D: int, V: int, chunk: int, block: int, num_competing: int = 4) -> tuple[Problem, Tensor]:
    """Hidden states that point at the target, and at other tokens that compete with it; also the whole weight."""
    g = torch.Generator(DEVICE).manual_seed(0)
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    weight_VD = torch.randn(V, D, generator=g, device=DEVICE) / D**0.5
    target_T = torch.randint(V, (T,), generator=g, device=DEVICE)

    def towards(token_T: Tensor, least: float, more: float) -> Tensor:
        return (least + more * torch.rand(T, 1, generator=g, device=DEVICE)) * weight_VD[token_T]

    hidden_TD = 1.5 * torch.randn(T, D, generator=g, device=DEVICE) + towards(target_T, 10.0, 20.0)
    for _ in range(num_competing):
        hidden_TD += towards(torch.randint(V, (T,), generator=g, device=DEVICE), 12.0, 14.0)
    hidden_TD, weight_VD = hidden_TD.bfloat16(), weight_VD.bfloat16()
    v = V // size
    teacher_T = -3 * torch.rand(T, generator=g, device=DEVICE)
    mine_vD = weight_VD[rank * v : (rank + 1) * v].clone()
    chunk = min(chunk, T) if chunk else chunk_of(T, v, mine_vD.element_size(), DEVICE)
    block = block or block_of(chunk, v, DEVICE)
    return Problem(hidden_TD, mine_vD, target_T, teacher_T, rank * v, group, chunk, block), weight_VD


def measure(shape: str, methods: list[str], rounds: int, chunk: int, block: int) -> list[Row]:
    T, D, V = (int(x) for x in shape.split(","))
    if V % (size := dist.get_world_size()):
        raise UserError(f"--shape {shape}: {size} ranks cannot share {V} tokens; choose a multiple")
    p, _ = problem(T, D, V, chunk, block)
    unit = p.chunk * len(p.weight_vD) * p.weight_vD.element_size()
    device = torch.cuda.get_device_name() if HAS_GPU else "CPU"
    rows, seconds = [], {name: list[float]() for name in methods}
    for name in methods:
        METHODS[name](p)  # a first call takes memory for the libraries' own
        with counted() as calls:
            scratch = peak_scratch(METHODS[name], p)
        rows.append(Row(device, shape, size, name, 0.0, 0.0, scratch / unit, len(calls)))
    for _ in range(rounds):
        for name in methods:
            dist.barrier()
            seconds[name].append(timed(METHODS[name], p))
    for row in rows:
        own, floor = seconds[row.method], seconds["floor"]
        row.ratio = statistics.median(x / y for x, y in zip(own, floor, strict=True))
        row.seconds = statistics.median(own)
    return rows


def with_errors(rows: list[Row], chunk: int, block: int) -> list[Row]:
    """Of the small problem, whatever the rows are of, with a teacher whose log-probs differ by about 0.05."""
    found = {row.method: row for row in rows}
    for num_competing in (0, 4):
        p, weight_VD = problem(*SMALL, chunk, block, num_competing)
        p, logprobs_T, grad_TD, grad_vD = true_gradients(p, weight_VD)
        for name, row in found.items():
            if name == "floor":
                continue
            got_T, got_TD, got_vD = METHODS[name](p)
            hidden_error, weight_error = _relative(got_TD, grad_TD), _relative(got_vD, grad_vD)
            if not num_competing:
                found[name] = replace(row, plain_hidden_error=hidden_error, plain_weight_error=weight_error)
                continue
            reward_T, true_T = p.teacher_T - got_T, p.teacher_T - logprobs_T
            found[name] = replace(
                row,
                logprob_error=float((got_T - logprobs_T).abs().max()),
                hidden_error=hidden_error,
                weight_error=weight_error,
                reward_error=_relative(reward_T, true_T),
                sign_flips=float((reward_T * true_T < 0).double().mean()),
            )
    return list(found.values())


def true_gradients(p: Problem, weight_VD: Tensor) -> tuple[Problem, Tensor, Tensor, Tensor]:
    """In float64: the problem with a close teacher, log-probs, and the gradients of hidden states and this rank's
    weight."""
    hidden_TD, weight_VD = p.hidden_TD.double().requires_grad_(), weight_VD.double().requires_grad_()
    logprobs_T = (hidden_TD @ weight_VD.t()).log_softmax(-1).gather(1, p.target_T[:, None])[:, 0]
    noise_T = torch.randn(len(logprobs_T), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    p = p._replace(teacher_T=logprobs_T.detach() + 0.05 * noise_T)
    (p.all_coefficients(logprobs_T.detach()) * logprobs_T).sum().backward()
    assert hidden_TD.grad is not None
    assert weight_VD.grad is not None
    grad_vD = weight_VD.grad[p.vocab_start : p.vocab_start + len(p.weight_vD)]
    return p, logprobs_T.detach(), hidden_TD.grad, grad_vD


def _relative(got: Tensor | None, want: Tensor) -> float:
    assert got is not None
    return float((got.double() - want).norm() / want.norm())


def join() -> None:
    """The process group of torchrun, or of this process alone; and Megatron's, where it is installed."""
    backend, timeout = "nccl" if HAS_GPU else "gloo", timedelta(seconds=600)
    if HAS_GPU:
        torch.cuda.set_device(DEVICE)
    if importlib.util.find_spec("megatron") is not None:
        import megatron_methods

        METHODS.update(megatron_methods.METHODS)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=HashStore(), rank=0, world_size=1)
    if "mcore" in METHODS:
        megatron_methods.initialize()


def chosen(names: str | None) -> list[str]:
    """The floor first. All that there are, unless some are named."""
    if names is None:
        if "mcore" not in METHODS and dist.get_rank() == 0:
            print(f"megatron-core is not installed: the rows of {', '.join(OF_MEGATRON)} are left out", flush=True)
        return list(METHODS)
    methods = ["floor", *(name for name in names.split(",") if name != "floor")]
    if unknown := set(methods) - METHODS.keys():
        needs = " (those of Megatron need megatron-core)" if unknown & set(OF_MEGATRON) else ""
        raise UserError(f"--methods {','.join(sorted(unknown))}: unknown{needs}; choose from {', '.join(METHODS)}")
    return methods


def print_parts(shape: str, rounds: int, chunk: int, block: int) -> None:
    """The median of the rounds, as seconds and as a multiple of the floor."""
    T, D, V = (int(x) for x in shape.split(","))
    p, _ = problem(T, D, V, chunk, block)
    found = [parts(p) for _ in range(rounds + 1)][1:]
    print(f"T, D, V = {shape}, tp {dist.get_world_size()}, rank {dist.get_rank()}, {DEVICE}")
    for name in found[0]:
        times = statistics.median(of_round[name] / of_round["floor"] for of_round in found)
        print(f"{name:24}{statistics.median(of_round[name] for of_round in found):8.3f} s {times:6.2f}", flush=True)


def bench(arguments: argparse.Namespace) -> None:
    join()
    methods = chosen(arguments.methods)
    for shape in arguments.shape:
        if arguments.parts:
            print_parts(shape, arguments.rounds, arguments.chunk, arguments.block)
            continue
        found = measure(shape, methods, arguments.rounds, arguments.chunk, arguments.block)
        if arguments.errors:
            found = with_errors(found, arguments.chunk, arguments.block)
        if dist.get_rank() == 0:
            print(table(found), flush=True)
            if arguments.out is not None:
                write(found, arguments.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=SHAPES, metavar="T,D,V")
    parser.add_argument("--methods", metavar="NAME,...")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--errors", action=argparse.BooleanOptionalAction, default=True, help="measure them too")
    parser.add_argument("--parts", action="store_true", help="where the time of ours goes instead (on a CPU)")
    parser.add_argument("--chunk", type=int, default=0, help="tokens at a time; 0: as in training")
    parser.add_argument("--block", type=int, default=0, help="columns at a time; 0: as in training")
    parser.add_argument("--out", type=Path, metavar="FOLDER")
    parsed = parser.parse_args()
    if not HAS_GPU:
        torch.set_num_threads(1)
    try:
        bench(parsed)
    except UserError as error:
        print(f"bench_head: error: {error}", file=sys.stderr)
        sys.exit(2)
