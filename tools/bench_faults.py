"""What the other lanes lose while one lane's endpoint misbehaves.

    python -m tools.bench_faults CONFIG [a.b=c ...] [--trajectories 400] [--rounds 5]

A teacher service is started for the configuration. The first lane reaches it through a proxy that breaks every one of
its requests, the others directly (or are embedded, where the service is killed outright). Rounds with and without the
fault take turns. Printed for each fault: the time of the other lanes without it over that with it (1: no loss), as the
median over rounds and between the fastest rounds; a trajectory that is lost ends the tool with an error.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np

from megatron_mopd import build
from megatron_mopd.cli import guarded
from megatron_mopd.config import Config, load_config, split_arguments
from megatron_mopd.errors import UserError
from megatron_mopd.hf_folder import read_hf_config
from megatron_mopd.protocols import TeacherScorer
from megatron_mopd.servers import files
from megatron_mopd.servers.launch import endpoints, servers
from megatron_mopd.service.client import ServiceClient
from megatron_mopd.teachers.lanes import Lane, Lanes
from megatron_mopd.trajectory_file import Sampled
from megatron_mopd.types import Prompt, RenderedPrompt, Segment, Trajectory
from tools.faulty_proxy import FAULTS, FaultyProxy

KILL = "SIGKILL"


def bench(words: list[str], count: int, num_rounds: int) -> int:
    files_, overrides = split_arguments(words)
    with tempfile.TemporaryDirectory() as folder:
        table = {"batch_tokens": 1024, "attempt_timeout_s": 1.0, "max_attempts": 1000000}
        overrides += [f"run.folder={folder}", *(f"teachers.{name}={value}" for name, value in table.items())]
        on_service = load_config(files_, [*overrides, "teachers.backend=megatron"])
        embedded = load_config(files_, [*overrides, "teachers.backend=embedded"])
        if len(on_service.teachers.models) < 2:
            raise UserError("name a configuration with two teachers or more")
        with servers(on_service):
            for fault in (*FAULTS, KILL):
                print(asyncio.run(row(fault, on_service, embedded, count, num_rounds)), flush=True)
    return 0


async def row(fault: str, config: Config, embedded: Config, count: int, num_rounds: int) -> str:
    sick = asyncio.Event()
    proxy = FaultyProxy(service_url(config), lambda teacher: fault if sick.is_set() else None)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    seeds = itertools.count(1000 * [*FAULTS, KILL].index(fault))  # the service keeps replies: nothing is asked twice
    async with proxy.serve() as broken, lanes_of(config, embedded, broken, fault) as lanes:
        first, *others = (teacher.name for teacher in config.teachers.models)
        await timed(lanes, others, sampled(config, count, next(seeds)))  # warms up
        for _ in range(num_rounds):
            for is_sick in (False, True):
                for one in sampled(config, count // len(others), next(seeds)):
                    lanes.submit(first, one)
                if is_sick and fault == KILL:
                    os.killpg(files.read_endpoint(config.run.folder, "service")["pid"], signal.SIGKILL)
                elif is_sick:
                    sick.set()
                seconds[is_sick].append(await timed(lanes, others, sampled(config, count, next(seeds))))
                sick.clear()
                await lanes.drain(0)  # nothing is lost: it raises otherwise
    ratios = sorted(well / ill for well, ill in zip(seconds[False], seconds[True], strict=True))
    fastest = min(seconds[False]) / min(seconds[True])
    return f"{fault:10} others {statistics.median(ratios):.3f} (fastest {fastest:.3f}), the lane itself lost nothing"


@asynccontextmanager
async def lanes_of(config: Config, embedded: Config, broken: str, fault: str) -> AsyncIterator[Lanes]:
    """The first teacher's endpoint is the proxy, or the service itself where that is to be killed."""
    first = config.teachers.models[0].name
    direct: dict[str, Sequence[TeacherScorer]] = build.teacher_endpoints(embedded if fault == KILL else config)
    sick = ServiceClient(service_url(config) if fault == KILL else broken, config)
    settings = config.teachers
    lanes = Lanes({n: Lane(n, [sick] if n == first else e, settings) for n, e in direct.items()}, settings)
    try:
        await lanes.start()
        yield lanes
    finally:
        await lanes.close()


async def timed(lanes: Lanes, names: Sequence[str], trajectories: Sequence[Sampled]) -> float:
    """Until these lanes have scored them, dealt out in turn."""
    start = time.monotonic()
    for i, one in enumerate(trajectories):
        lanes.submit(names[i % len(names)], one)
    for name in names:
        lanes[name].send()
    await asyncio.gather(*(lanes[name].wait(None) for name in names))
    seconds = time.monotonic() - start
    for name in names:
        lanes[name].take()
    return seconds


def sampled(config: Config, count: int, seed: int) -> list[Sampled]:
    """Random trajectories of 1 to rollout.max_response_tokens tokens."""
    rng = np.random.default_rng(seed)
    vocab_size = read_hf_config(config.student.checkpoint)["vocab_size"]
    made = []
    for i in range(count):
        n = int(rng.integers(1, config.rollout.max_response_tokens + 1))
        ids = tuple(rng.integers(0, vocab_size, 16 + n).tolist())
        prompt = RenderedPrompt(Prompt(str(i), "", "", "", ()), ids[:16], ids[:16])
        segment = Segment(ids[16:], (-1.0,) * n, (True,) * n, 0)
        made.append(Sampled(Trajectory(f"{i}@{seed}", prompt, (segment,), "stop"), 0))
    return made


def service_url(config: Config) -> str:
    return endpoints(config.run.folder)["service"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", metavar="CONFIG | a.b=c")
    parser.add_argument("--trajectories", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    a = parser.parse_args()
    sys.exit(guarded(lambda: bench(a.words, a.trajectories, a.rounds)))
