"""Scored tokens/s of the Megatron teacher service over HTTP against a bare forward loop, and its bytes on the wire.

    python tools/bench_service.py CONFIG [a.b=c ...]
        [--trajectories 864] [--prompt-tokens 16] [--response-tokens 24] [--rounds 7]

All teachers of the configuration are served at the layout of `service.megatron` on `service.num_processes` ranks. A
client in a process of its own sends random trajectories of 1 to --response-tokens tokens as lanes do, over connections
that others have opened before. In turns with it the same ranks run the batches that the service has just made of them:
packed already, without queue, HTTP, broadcast or collection. Compare the ratio, not the tokens/s of two machines. What
a request costs beside its tokens shows with teachers.batch_tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from megatron_mopd.cli import guarded
from megatron_mopd.config import Config, load_config, split_arguments
from megatron_mopd.errors import UserError
from megatron_mopd.hf_folder import read_hf_config
from megatron_mopd.launch import launch
from megatron_mopd.protocols import EndpointDown, ScoreRequest
from megatron_mopd.ranks import end_with_launcher, rank
from megatron_mopd.service.client import ServiceClient

HEADER_BYTES = 600
"""HTTP's, of a request and its reply together; about."""


def start(config: Config, arguments: list[str]) -> int:
    return launch("tools.bench_service", [*arguments, "--as=rank"], config.service.num_processes, config.run.folder)


def run_rank(config: Config, arguments: list[str], num_rounds: int, warm_tokens: int) -> None:
    """Rounds of both ways on the ranks, after one that warms them up; rank 0 prints. The first `warm_tokens` of a round
    are not timed."""
    from megatron_mopd.mcore import parallel
    from megatron_mopd.mcore.teacher_ranks import service_layout

    parallel.init_distributed(config.run.timeout_s)
    parallel.initialize_parallel(service_layout(config), config.run.seed)
    ranks = recording_ranks(config)
    client = None
    if rank() == 0:
        words = [sys.executable, "-m", "tools.bench_service", *arguments, "--as=client"]
        client = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    rounds: list[dict[str, float]] = []
    for _ in range(num_rounds + 1):
        ranks.scored.clear()
        service = service_round(config, ranks, client)
        rounds.append({**service, "bare_s": bare_round(ranks, timed(ranks.scored, warm_tokens))})
    if client is not None:
        client.communicate()
        print(table(rounds[1:]), flush=True)


def recording_ranks(config: Config) -> Any:
    """TeacherRanks that keeps the batches that it has scored, in order."""
    from megatron_mopd.mcore.teacher_ranks import TeacherRanks, batch_of

    class RecordingRanks(TeacherRanks):
        scored: list[tuple[str, Any]] = []  # noqa: RUF012

        def score(self, teacher: str, rows: Any) -> Any:
            self.scored.append((teacher, batch_of(rows)))
            return super().score(teacher, rows)

    return RecordingRanks(config)


def service_round(config: Config, ranks: Any, client: subprocess.Popen[str] | None) -> dict[str, float]:
    """What the client measured, on rank 0."""
    from megatron_mopd.mcore.serve_teacher import answer_until_drained, what_is_served
    from megatron_mopd.service.front import Front

    names = [teacher.name for teacher in config.teachers.models]
    if client is None:
        answer_until_drained(None, ranks, names)
        return {}
    front, measured = Front(config, what_is_served(config)), {}
    print(front.start(), file=client.stdin, flush=True)

    def wait() -> None:
        assert client.stdout is not None
        line = client.stdout.readline()
        front.drain()
        measured.update(json.loads(line) if line else {})  # it has said why

    waiting = threading.Thread(target=wait)
    waiting.start()
    answer_until_drained(front, ranks, names)
    waiting.join()
    front.close()
    if not measured:
        raise UserError("the client has ended; its error is above")
    return measured


def timed(scored: list[tuple[str, Any]], warm_tokens: int) -> list[tuple[str, Any]]:
    """The batches after those of the first `warm_tokens`."""
    ends = np.cumsum([len(batch.token_ids) for _, batch in scored]).tolist()
    return scored[ends.index(warm_tokens) + 1 :]


def bare_round(ranks: Any, scored: list[tuple[str, Any]]) -> float:
    """Seconds of the forward passes alone of these batches."""
    import torch
    import torch.distributed as dist

    packed = [(teacher, ranks.pack(batch)) for teacher, batch in scored]
    dist.barrier()
    start = time.monotonic()
    for teacher, mine in packed:
        ranks.weights.switch_to(teacher)
        ranks.forward(mine)
    torch.cuda.synchronize()
    dist.barrier()
    return time.monotonic() - start


def table(rounds: list[dict[str, float]]) -> str:
    ratios = sorted(r["bare_s"] / r["service_s"] for r in rounds)
    scored, fed = rounds[0]["scored_tokens"], rounds[0]["tokens"]
    lines = [f"{scored:.0f} response tokens of {fed:.0f} tokens, {len(rounds)} rounds"]
    for way in ("service", "bare"):
        seconds = statistics.median(r[f"{way}_s"] for r in rounds)
        lines.append(f"{way:8} {scored / seconds:10.0f} scored tokens/s {fed / seconds:10.0f} tokens/s")
    fastest = min(r["bare_s"] for r in rounds) / min(r["service_s"] for r in rounds)
    lines.append(f"ratio    {statistics.median(ratios):10.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")
    lines.append(f"fastest  {fastest:10.3f} (of the fastest rounds, which other work on the machine disturbs least)")
    lines.append(f"wire     {rounds[0]['wire_bytes'] / scored:10.2f} bytes per scored token")
    return "\n".join(lines)


class CountingClient(ServiceClient):
    """Adds up what it sends and receives."""

    def __init__(self, url: str, config: Config):
        super().__init__(url, config)
        self.wire_bytes = 0
        post, self._client.post_bytes = self._client.post_bytes, self._counted
        self._post_bytes = post

    async def _counted(self, url: str, path: str, body: bytes, headers: Any) -> bytes:
        reply = await self._post_bytes(url, path, body, headers)
        self.wire_bytes += len(body) + len(reply) + HEADER_BYTES
        return reply


Requests = dict[str, list[ScoreRequest]]
"""By teacher."""


def run_client(config: Config, warm: Requests, requests: Requests) -> None:
    """For each URL that comes in, score everything there, and say how long the second part took."""
    for line in sys.stdin:
        seconds, wire_bytes = asyncio.run(score_all(config, line.strip(), warm, requests))
        everything = [r for of_teacher in requests.values() for r in of_teacher]
        measured = {
            "service_s": seconds,
            "wire_bytes": wire_bytes,
            "tokens": sum(r.num_tokens for r in everything),
            "scored_tokens": sum(len(r.response_ids) for r in everything),
        }
        print(json.dumps(measured), flush=True)


def trajectories(config: Config, number: int, prompt_tokens: int, response_tokens: int, seed: int) -> Requests:
    """Equally many for each teacher."""
    rng, teachers = np.random.default_rng(seed), config.teachers.models
    vocab_size = read_hf_config(teachers[0].checkpoint)["vocab_size"]
    requests: Requests = {teacher.name: [] for teacher in teachers}
    for i in range(number):
        ids = tuple(rng.integers(0, vocab_size, prompt_tokens + int(rng.integers(1, response_tokens + 1))).tolist())
        requests[teachers[i % len(teachers)].name].append(
            ScoreRequest(str(i), ids[:prompt_tokens], ids[prompt_tokens:])
        )
    return requests


async def score_all(config: Config, url: str, warm: Requests, requests: Requests) -> tuple[float, int]:
    """(seconds, bytes on the wire) of `requests`."""
    client = CountingClient(url, config)
    room = {name: asyncio.Semaphore(config.teachers.max_in_flight) for name in requests}
    for name in requests:
        await prepared(client, name)

    async def send(name: str, batch: list[ScoreRequest]) -> None:
        async with room[name]:
            await client.score(name, batch)

    for part in (warm, requests):
        cut = [
            (name, b) for name, of_teacher in part.items() for b in batches(of_teacher, config.teachers.batch_tokens)
        ]
        client.wire_bytes, start = 0, time.monotonic()
        await asyncio.gather(*(send(name, batch) for name, batch in cut))
        seconds = time.monotonic() - start
    await client.close()
    return seconds, client.wire_bytes


async def prepared(client: ServiceClient, teacher: str) -> None:
    """The service opens with its first look at the queue."""
    while True:
        try:
            return await client.prepare(teacher)
        except EndpointDown:
            await asyncio.sleep(0.05)


def batches(requests: list[ScoreRequest], batch_tokens: int) -> Iterator[list[ScoreRequest]]:
    """As a lane cuts them."""
    batch: list[ScoreRequest] = []
    num_tokens = 0
    for request in requests:
        batch.append(request)
        num_tokens += request.num_tokens
        if num_tokens >= batch_tokens:
            yield batch
            batch, num_tokens = [], 0
    if batch:
        yield batch


def main() -> int | None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", metavar="CONFIG | a.b=c")
    parser.add_argument("--trajectories", type=int, default=864)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--response-tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--as", dest="part", choices=("rank", "client"), help=argparse.SUPPRESS)
    a = parser.parse_intermixed_args()
    arguments = [word for word in sys.argv[1:] if not word.startswith("--as=")]
    files, overrides = split_arguments(a.words)
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(files, [*overrides, f"run.folder={folder}", "teachers.backend=megatron"])
        if a.part is None:
            return start(config, arguments)
        sizes = (a.trajectories, a.prompt_tokens, a.response_tokens)
        warm, requests = (trajectories(config, *sizes, seed) for seed in (1, 0))
        if a.part == "client":
            return run_client(config, warm, requests)
        end_with_launcher()
        return run_rank(config, arguments, a.rounds, sum(r.num_tokens for name in warm for r in warm[name]))


if __name__ == "__main__":
    code = guarded(main, rank())
    sys.stdout.flush()
    os._exit(code)
