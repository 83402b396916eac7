"""One server and the teachers that live on it: it holds the weights of one of them at a time.

    POST /generate {"input_ids": [prompt + response, ...], "logprob_start_len": [len(prompt) - 1, ...], 0 new tokens}

Promises (tests/sglang/test_scorer_contract.py, tests/sglang/test_scoring.py): aligned by position from the left (SGLang
names the vocabulary's last id 0); a reply is used only if the server stamped it with the weights that the teacher was
found on; weights change only when nothing is in flight; a server that died gets no work before it holds the right
weights again. No prefix of one teacher is cached for another. Requests carry tokens alone: no routes of the student, no
weights. Scores depend on what a server batches and caches in their last bits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_mopd.client import Client
from megatron_mopd.errors import UserError
from megatron_mopd.hf_folder import read_hf_config
from megatron_mopd.protocols import EndpointDown, ScoreRequest
from megatron_mopd.sglang.identity import (
    LOADING,
    PROBE_SILENCE_S,
    SCORING,
    ServerFacts,
    check_server,
    check_weights,
)
from megatron_mopd.sglang.placement import INITIAL_VERSION
from megatron_mopd.sglang.turns import Turns
from megatron_mopd.sglang.weights import load_folder, read_version


@dataclass(frozen=True)
class TeacherPlace:
    """Where teachers live: a server by URL, and the checkpoint of each.

    `may_load`: the server is ours, was started with the first of them, and loads the one that is asked for. Otherwise
    it must hold the weights of its one teacher.
    """

    url: str
    checkpoints: Mapping[str, Path]
    may_load: bool


class TeacherServer:
    """Implements protocols.TeacherScorer. `min_input_tokens`: the server must take at least so many in one request."""

    def __init__(
        self,
        place: TeacherPlace,
        silence_s: float,
        *,
        temperature: float = 1.0,
        min_input_tokens: int = 1,
        api_key: str | None = None,
    ):
        if temperature != 1.0:
            raise UserError(
                f"SGLang scores at temperature 1, rollout.temperature={temperature:g}; "
                "set rollout.temperature=1, or another teachers.backend"
            )
        self.place, self.url, self._min_input_tokens = place, place.url, min_input_tokens
        self.facts = ServerFacts(max_input_tokens=0, prefill_tokens=0)
        self._client = Client(silence_s, api_key)
        self._vocab_size = {name: read_hf_config(folder)["vocab_size"] for name, folder in place.checkpoints.items()}
        self._loaded: str | None = None
        """The teacher whose weights it holds for certain; None: it must be asked and checked first."""
        self._version = ""
        self._turns, self._changing = Turns(), asyncio.Lock()

    async def prepare(self, teacher: str) -> None:
        """Its lanes ask one after the other; the first finds out for all."""
        self._check_name(teacher)
        async with self._changing:
            await self._client.get(self.url, "/server_info", PROBE_SILENCE_S)
            if self._loaded is None:
                await self._hold(teacher)

    async def score(self, teacher: str, requests: Sequence[ScoreRequest]) -> list[np.ndarray]:
        self._check_name(teacher)
        for request in requests:
            self._check(teacher, request)
        rows = [row for row, request in enumerate(requests) if request.response_ids]  # others need none
        scores = [np.zeros(0, np.float32)] * len(requests)
        if rows:
            async with self._turns.hold(teacher):
                replies = await self._post(teacher, [requests[row] for row in rows])
            for row, logprobs in zip(rows, replies, strict=True):
                scores[row] = logprobs
        return scores

    async def close(self) -> None:
        await self._client.close()

    async def _post(self, teacher: str, requests: Sequence[ScoreRequest]) -> list[np.ndarray]:
        try:
            async with self._changing:  # nothing is in flight when the first of a turn comes here
                if self._loaded != teacher:
                    await self._load(teacher)
            version = self._version
            reply = await self._client.post(self.url, "/generate", scoring_body(teacher, requests))
            return self._read(reply, requests, version)
        except EndpointDown:
            self._loaded = None
            raise

    def _read(self, reply: Any, requests: Sequence[ScoreRequest], version: str) -> list[np.ndarray]:
        """The log-probs of each request: entries are (log-prob, id, text), one for each token from the prompt's
        last."""
        if not isinstance(reply, list) or len(reply) != len(requests):
            raise EndpointDown(self.url, f"it answered what is no list of {len(requests)} results")
        scores = []
        for result, request in zip(reply, requests, strict=True):
            meta = result["meta_info"]
            if meta["finish_reason"]["type"] == "abort":
                raise EndpointDown(self.url, f"it gave the request up: {meta['finish_reason'].get('message')}")
            if meta["weight_version"] != version:
                raise EndpointDown(self.url, f"it serves weights {meta['weight_version']!r} instead of {version!r}")
            entries = meta["input_token_logprobs"]
            if len(entries) != len(request.response_ids) + 1:
                raise EndpointDown(
                    self.url,
                    f"{len(entries) - 1} log-probs for the {len(request.response_ids)} response tokens of trajectory "
                    f"{request.trajectory_id}; SGLang 0.5.23 or newer is needed",
                )
            logprobs = np.array([entry[0] for entry in entries[1:]], np.float32)  # null becomes NaN
            if not np.isfinite(logprobs).all():
                raise EndpointDown(
                    self.url,
                    f"non-finite log-probs for trajectory {request.trajectory_id}; if it stays so, use another "
                    "checkpoint",
                )
            scores.append(logprobs)
        return scores

    async def _load(self, teacher: str) -> None:
        """Let it serve this teacher. Where it is not known what it holds, it is checked anew."""
        if self._loaded is None:
            await self._hold(teacher)
        elif self._loaded != teacher:
            self._loaded = None
            await self._load_folder(teacher)

    async def _load_folder(self, teacher: str) -> None:
        checkpoint = self.place.checkpoints[teacher]
        await load_folder(self._client, self.url, checkpoint, _version_of(checkpoint))
        self._loaded, self._version = teacher, _version_of(checkpoint)

    async def _hold(self, teacher: str) -> None:
        """It is the right server and holds this teacher."""
        place, checkpoint = self.place, self.place.checkpoints[teacher]
        self.facts = await check_server(
            self._client,
            self.url,
            checkpoint,
            endpoints=SCORING + (LOADING if place.may_load else ()),
            min_input_tokens=self._min_input_tokens,
        )
        if place.may_load and await read_version(self._client, self.url) not in self._versions_of(teacher):
            await self._load_folder(teacher)
        await check_weights(self._client, self.url, checkpoint, f"teacher {teacher}")
        self._version, self._loaded = await read_version(self._client, self.url), teacher

    def _versions_of(self, teacher: str) -> set[str]:
        """What a server of ours says of its weights when they are this teacher's."""
        is_first = teacher == next(iter(self.place.checkpoints))
        return {_version_of(self.place.checkpoints[teacher]), *([INITIAL_VERSION] if is_first else [])}

    def _check_name(self, teacher: str) -> None:
        if teacher not in self.place.checkpoints:
            raise UserError(f"no teacher named {teacher}; known: {', '.join(self.place.checkpoints)}")

    def _check(self, teacher: str, request: ScoreRequest) -> None:
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
        if (length := request.num_tokens) > self.facts.max_input_tokens:
            raise UserError(
                f"trajectory {trajectory} has {length} tokens, server {self.url} of teacher {teacher} takes at "
                f"most {self.facts.max_input_tokens}; raise its context_length or max_total_tokens"
            )


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


def _version_of(checkpoint: Path) -> str:
    return str(checkpoint.absolute())
