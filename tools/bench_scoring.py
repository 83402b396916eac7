"""Tokens/s of a lane on an SGLang server against the server's own limit, which is a raw loop of prepared requests.

    python tools/bench_scoring.py CONFIG [a.b=c ...] [--trajectories 512] [--prompt-tokens 32] [--rounds 7]

The first teacher of the configuration scores random trajectories of 1 to rollout.max_response_tokens tokens, on a
server that is started for it, or on the one that `sglang.teachers.urls` gives. Both ways, the lane of a run and the raw
loop, send the same requests, as many at a time, in turns; the raw loop reads the replies as bytes. The prefix cache is
emptied before each. Compare the ratio, not the tokens/s of two machines.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator

import aiohttp
import numpy as np
import orjson

from megatron_mopd import build
from megatron_mopd.cli import guarded
from megatron_mopd.config import Config, load_config, split_arguments
from megatron_mopd.errors import UserError
from megatron_mopd.hf_folder import read_hf_config
from megatron_mopd.protocols import ScoreRequest
from megatron_mopd.servers.launch import servers
from megatron_mopd.sglang.teacher_server import scoring_body
from megatron_mopd.teachers.lanes import Lane


def bench(words: list[str], num_trajectories: int, prompt_tokens: int, num_rounds: int) -> int:
    files, overrides = split_arguments(words)
    with tempfile.TemporaryDirectory() as folder:
        overrides += [f"run.folder={folder}", "teachers.backend=sglang", "rollout.engine=embedded"]
        config = first_teacher(load_config(files, overrides))
        requests = trajectories(config, num_trajectories, prompt_tokens)
        with servers(config):
            seconds = asyncio.run(compare(config, requests, num_rounds))
        print(table(seconds, sum(len(r.prompt_ids) + len(r.response_ids) for r in requests)))
    return 0


def first_teacher(config: Config) -> Config:
    """The configuration with one teacher on one server."""
    if not config.teachers.models:
        raise UserError("teachers.models is empty; name a configuration with teachers")
    teacher = config.teachers.models[0]
    urls = {name: of_one for name, of_one in config.sglang.teachers.urls.items() if name == teacher.name}
    table = config.sglang.teachers.model_copy(update={"num_servers": None, "urls": urls})
    return config.model_copy(
        update={
            "teachers": config.teachers.model_copy(update={"models": (teacher,)}),
            "sglang": config.sglang.model_copy(update={"teachers": table}),
        }
    )


def trajectories(config: Config, count: int, prompt_tokens: int) -> list[ScoreRequest]:
    rng = np.random.default_rng(0)
    vocab_size = read_hf_config(config.teachers.models[0].checkpoint)["vocab_size"]
    lengths = rng.integers(1, config.rollout.max_response_tokens + 1, count)
    tokens = [tuple(rng.integers(0, vocab_size, prompt_tokens + n).tolist()) for n in lengths]
    return [ScoreRequest(str(i), t[:prompt_tokens], t[prompt_tokens:]) for i, t in enumerate(tokens)]


async def compare(config: Config, requests: list[ScoreRequest], num_rounds: int) -> dict[str, list[float]]:
    """Seconds of each round of both ways, in turns, after one round that warms them up."""
    teacher, at_a_time = config.teachers.models[0].name, config.teachers.max_in_flight
    lanes = build.teacher_lanes(config)
    batches = list(batches_of(requests, config.teachers.batch_tokens))
    bodies = [orjson.dumps(scoring_body(teacher, batch)) for batch in batches]
    seconds: dict[str, list[float]] = {"lane": [], "raw": []}
    try:
        await lanes.start()
        url = lanes[teacher].urls[0]
        async with aiohttp.ClientSession(headers={"Content-Type": "application/json"}) as session:
            for _ in range(num_rounds + 1):
                seconds["raw"].append(await timed(session, url, lambda: raw(session, url, bodies, at_a_time)))
                seconds["lane"].append(await timed(session, url, lambda: in_lane(lanes[teacher], batches)))
    finally:
        await lanes.close()
    return {way: times[1:] for way, times in seconds.items()}


def batches_of(requests: list[ScoreRequest], batch_tokens: int) -> Iterator[list[ScoreRequest]]:
    """As a lane cuts them."""
    batch: list[ScoreRequest] = []
    for request in requests:
        batch.append(request)
        if sum(r.num_tokens for r in batch) >= batch_tokens:
            yield batch
            batch = []
    if batch:
        yield batch


async def in_lane(lane: Lane, batches: list[list[ScoreRequest]]) -> None:
    await asyncio.gather(*map(lane.score, batches))


async def timed(session: aiohttp.ClientSession, url: str, work: Callable[[], Awaitable[object]]) -> float:
    async with session.post(f"{url}/flush_cache", params={"timeout": 30}) as reply:
        reply.raise_for_status()
    start = time.monotonic()
    await work()
    return time.monotonic() - start


async def raw(session: aiohttp.ClientSession, url: str, bodies: list[bytes], at_a_time: int) -> None:
    room = asyncio.Semaphore(at_a_time)

    async def send(body: bytes) -> None:
        async with room, session.post(f"{url}/generate", data=body) as reply:
            reply.raise_for_status()
            await reply.read()

    await asyncio.gather(*map(send, bodies))


def table(seconds: dict[str, list[float]], num_tokens: int) -> str:
    """Ratios are times of the raw loop to those of the lane: the median over rounds, and of the fastest rounds, which
    other work on the machine disturbs least."""
    ratios = sorted(raw / lane for raw, lane in zip(seconds["raw"], seconds["lane"], strict=True))
    return "\n".join(
        [
            f"{num_tokens} tokens, {len(ratios)} rounds",
            *(f"{way:8} {num_tokens / statistics.median(times):10.0f} tokens/s" for way, times in seconds.items()),
            f"ratio    {statistics.median(ratios):10.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})",
            f"fastest  {ratio_of_fastest(seconds):10.3f}",
        ]
    )


def ratio_of_fastest(seconds: dict[str, list[float]]) -> float:
    return min(seconds["raw"]) / min(seconds["lane"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", metavar="CONFIG | a.b=c")
    parser.add_argument("--trajectories", type=int, default=512)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    a = parser.parse_args()
    sys.exit(guarded(lambda: bench(a.words, a.trajectories, a.prompt_tokens, a.rounds)))
