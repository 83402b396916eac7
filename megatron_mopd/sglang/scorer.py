"""Frozen teachers on SGLang servers: one prefill per trajectory, one log-prob per response token.

    POST /generate {"input_ids": [prompt + response, ...], "logprob_start_len": [len(prompt) - 1, ...], 0 new tokens}

Promises (tests/sglang/test_scorer_contract.py, tests/sglang/test_scoring.py): float32, finite, aligned by position from
the left (SGLang names the vocabulary's last id 0); exactly one result per trajectory, from the weights of its teacher,
also when servers die in the middle of it; a dead server delays only the teachers that live on it. Requests carry tokens
alone: no routes of the student, no weights. Scores depend on what a server batches and caches in their last bits.

Trajectories travel in POSTs of about what the server prefills in one pass. The first trajectories of all prompts go
before the second ones, which then find their prompt in the prefix cache.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_mopd.client import Client
from megatron_mopd.config import Config, SGLang
from megatron_mopd.errors import UserError
from megatron_mopd.hf_folder import read_hf_config
from megatron_mopd.protocols import ScoreRequest
from megatron_mopd.sglang.launch import api_key, check_keeper, endpoints
from megatron_mopd.sglang.placement import teacher_servers
from megatron_mopd.sglang.teacher_server import TeacherPlace, TeacherServer


class SGLangScorer:
    """Implements protocols.TeacherScorer. `min_input_tokens`: every server must take at least so many in one request.
    `check_hope()` raises UserError where dead servers of ours will not come back."""

    def __init__(
        self,
        places: Sequence[TeacherPlace],
        settings: SGLang,
        *,
        temperature: float = 1.0,
        min_input_tokens: int = 1,
        api_key: str | None = None,
        check_hope: Callable[[], None] = lambda: None,
    ):
        if temperature != 1.0:
            raise UserError(
                f"SGLang scores at temperature 1, rollout.temperature={temperature:g}; "
                "set rollout.temperature=1, or teachers.backend=embedded"
            )
        self._client = Client(settings.request_timeout_s, api_key)
        self.servers: dict[str, TeacherServer] = {}
        for place in places:
            hope = check_hope if place.may_load else lambda: None
            server = TeacherServer(place, self._client, settings, min_input_tokens=min_input_tokens, check_hope=hope)
            self.servers |= dict.fromkeys(place.checkpoints, server)
        self._vocab_size = {t: read_hf_config(c)["vocab_size"] for p in places for t, c in p.checkpoints.items()}

    async def start(self) -> None:
        """Return once every server is up and is the right one; wait for those that are not, `start_timeout_s`."""
        await asyncio.gather(*(server.start() for server in set(self.servers.values())))

    async def score(self, teacher: str, requests: Sequence[ScoreRequest]) -> list[np.ndarray]:
        if teacher not in self.servers:
            raise UserError(f"no teacher named {teacher}; known: {', '.join(self.servers)}")
        server = self.servers[teacher]
        for request in requests:
            self._check(teacher, server, request)
        sent = list(posts(requests, server.facts.prefill_tokens))
        tasks = [
            asyncio.create_task(_score_together(server, teacher, [requests[row] for row in rows])) for rows in sent
        ]
        scores = [np.zeros(0, np.float32)] * len(requests)
        try:
            for rows, scored in zip(sent, await asyncio.gather(*tasks), strict=True):
                for row, logprobs in zip(rows, scored, strict=True):
                    scores[row] = logprobs
        finally:
            for task in tasks:
                task.cancel()
        return scores

    async def close(self) -> None:
        await asyncio.gather(*(server.close() for server in set(self.servers.values())))
        await self._client.close()

    def _check(self, teacher: str, server: TeacherServer, request: ScoreRequest) -> None:
        """What a server would not survive (a foreign id kills SGLang), or would refuse together with its neighbours."""
        trajectory, vocab_size = request.trajectory_id, self._vocab_size[teacher]
        if not request.prompt_ids:
            raise ValueError(f"{trajectory}: an empty prompt leaves the first response token without context")
        for ids in filter(None, (request.prompt_ids, request.response_ids)):
            if min(ids) < 0 or max(ids) >= vocab_size:
                foreign = next(i for i in ids if not 0 <= i < vocab_size)
                raise UserError(
                    f"trajectory {trajectory} has token id {foreign}, the vocabulary of teacher {teacher} has "
                    f"{vocab_size} tokens; check the prompt's rendering and the environment's observations"
                )
        if (length := _length(request)) > server.facts.max_input_tokens:
            raise UserError(
                f"trajectory {trajectory} has {length} tokens, server {server.place.url} of teacher {teacher} takes at "
                f"most {server.facts.max_input_tokens}; raise its context_length or max_total_tokens"
            )


def sglang_scorer(config: Config) -> SGLangScorer:
    """The teachers of a run, on the servers that were started for it and on those given by URL."""
    table, checkpoints = config.sglang, {t.name: t.checkpoint for t in config.teachers.models}
    started = teacher_servers(config)
    urls = endpoints(config.run.folder) if started else {}
    shared: dict[str, dict[str, Path]] = {}
    for teacher, server in started.items():
        shared.setdefault(urls[server], {})[teacher] = checkpoints[teacher]
    return SGLangScorer(
        [
            *(TeacherPlace(url, teachers, may_load=True) for url, teachers in shared.items()),
            *(TeacherPlace(u, {t: checkpoints[t]}, may_load=False) for t, u in table.teachers.urls.items()),
        ],
        table,
        temperature=config.rollout.temperature,
        min_input_tokens=config.rollout.max_response_tokens + 1,
        api_key=api_key(config),
        check_hope=lambda: check_keeper(config.run.folder),
    )


def _length(request: ScoreRequest) -> int:
    return len(request.prompt_ids) + len(request.response_ids)


def posts(requests: Sequence[ScoreRequest], max_tokens: int) -> Iterator[list[int]]:
    """Rows that travel together: about `max_tokens` tokens, at least one row. Rows without a response need none."""
    seen: Counter[tuple[int, ...]] = Counter()
    order: list[tuple[int, tuple[int, ...], int]] = []
    for row, request in enumerate(requests):
        if request.response_ids:
            order.append((seen[request.prompt_ids], request.prompt_ids, row))
            seen[request.prompt_ids] += 1
    rows: list[int] = []
    tokens = 0
    for _, _, row in sorted(order):
        if rows and tokens + _length(requests[row]) > max_tokens:
            yield rows
            rows, tokens = [], 0
        rows.append(row)
        tokens += _length(requests[row])
    if rows:
        yield rows


async def _score_together(server: TeacherServer, teacher: str, requests: Sequence[ScoreRequest]) -> list[np.ndarray]:
    """One POST."""
    first, others = requests[0].trajectory_id, len(requests) - 1
    what = f"teacher {teacher}, trajectory {first}" + (f" and {others} more" if others else "")
    results = await server.generate(teacher, what, scoring_body(teacher, requests))
    if len(results) != len(requests):
        raise UserError(f"{what}: server {server.place.url} answered {len(results)} of {len(requests)} requests")
    return [
        _logprobs(result, request, teacher, server.place.url) for result, request in zip(results, requests, strict=True)
    ]


def scoring_body(teacher: str, requests: Sequence[ScoreRequest]) -> dict[str, Any]:
    """Of the /generate that scores these trajectories. The log-prob at `logprob_start_len` itself comes back as null:
    it belongs to the last token of the prompt, whose predecessor may be in the cache."""
    return {
        "input_ids": [[*request.prompt_ids, *request.response_ids] for request in requests],
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": [len(request.prompt_ids) - 1 for request in requests],
        "extra_key": teacher,  # of the prefix cache
    }


def _logprobs(result: Mapping[str, Any], request: ScoreRequest, teacher: str, url: str) -> np.ndarray:
    """The [R] log-probs in one result: entries are (log-prob, id, text), one for each token from the prompt's last."""
    entries = result["meta_info"]["input_token_logprobs"]
    if len(entries) != len(request.response_ids) + 1:
        raise UserError(
            f"teacher {teacher} gives {len(entries) - 1} log-probs for the {len(request.response_ids)} response tokens "
            f"of trajectory {request.trajectory_id} on {url}; start SGLang 0.5.23 or newer there"
        )
    logprobs = np.array([entry[0] for entry in entries[1:]], np.float32)  # null becomes NaN
    if not np.isfinite(logprobs).all():
        raise UserError(
            f"teacher {teacher} gives non-finite log-probs for trajectory {request.trajectory_id} on {url}; "
            "use another checkpoint"
        )
    return logprobs
