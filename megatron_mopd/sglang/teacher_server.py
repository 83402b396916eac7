"""One server and the teachers that live on it: it holds the weights of one of them at a time.

Promises (tests/sglang/test_scoring.py): a reply is used only if the server stamped it with the weights that the teacher
was found on; weights change only when nothing is in flight; a server that died comes back with the right weights before
it gets work. No prefix of one teacher is cached for another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_mopd.client import Client, RequestRefused
from megatron_mopd.config import SGLang
from megatron_mopd.errors import UserError
from megatron_mopd.fleet import Fleet
from megatron_mopd.protocols import EndpointDown
from megatron_mopd.sglang.identity import LOADING, SCORING, ServerFacts, check_server, check_weights
from megatron_mopd.sglang.placement import INITIAL_VERSION
from megatron_mopd.sglang.turns import Turns
from megatron_mopd.sglang.weights import load_folder, read_version

POSTS_IN_FLIGHT = 4
"""Enough that the server never waits for the next one."""


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
    def __init__(
        self,
        place: TeacherPlace,
        client: Client,
        settings: SGLang,
        *,
        min_input_tokens: int,
        check_hope: Callable[[], None],
    ):
        self.place, self._client, self._min_input_tokens = place, client, min_input_tokens
        self.facts = ServerFacts(max_input_tokens=0, prefill_tokens=0)
        self._wanted = next(iter(place.checkpoints))
        self._loaded: str | None = None
        self._version = ""
        self._turns, self._loading = Turns(), asyncio.Lock()
        self._fleet = Fleet(
            "teacher",
            client,
            [place.url],
            self._prepare,
            max_requests=min(POSTS_IN_FLIGHT, settings.max_requests),
            start_timeout_s=settings.start_timeout_s,
            recovery_timeout_s=settings.recovery_timeout_s,
            check_hope=check_hope,
        )

    async def start(self) -> None:
        await self._fleet.start()

    async def close(self) -> None:
        await self._fleet.close()

    async def generate(self, teacher: str, what: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The reply to one /generate with a list of prompts, computed with the weights of `teacher`."""
        async with self._turns.hold(teacher):
            await self._load(teacher, what)
            try:
                return await self._fleet.run(what, lambda url: self._post(url, body))
            except RequestRefused as refusal:
                raise UserError(f"{what}: {refusal}") from None

    async def _post(self, url: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        version = self._version
        reply = await self._client.post(url, "/generate", body)
        for meta in (result["meta_info"] for result in reply):
            if meta["finish_reason"]["type"] == "abort":
                raise EndpointDown(url, f"it gave the request up: {meta['finish_reason'].get('message')}")
            if meta["weight_version"] != version:
                raise EndpointDown(url, f"it serves weights {meta['weight_version']!r} instead of {version!r}")
        return reply

    async def _load(self, teacher: str, what: str) -> None:
        """Nothing is in flight when the first of a turn comes here; the others of its turn wait."""
        async with self._loading:
            if self._loaded != teacher:
                self._wanted, self._loaded = teacher, None
                await self._fleet.run(f"{what}: loading its weights", self._switch)

    async def _switch(self, url: str) -> None:
        if self._loaded != self._wanted:  # else `_prepare` has, after the server had died here
            checkpoint = self.place.checkpoints[self._wanted]
            await load_folder(self._client, url, checkpoint, _version_of(checkpoint))
            self._loaded, self._version = self._wanted, _version_of(checkpoint)

    async def _prepare(self, url: str) -> None:
        """It is the right server and holds the teacher whose turn it is."""
        teacher, place = self._wanted, self.place
        checkpoint = place.checkpoints[teacher]
        self.facts = await check_server(
            self._client,
            url,
            checkpoint,
            endpoints=SCORING + (LOADING if place.may_load else ()),
            min_input_tokens=self._min_input_tokens,
        )
        if place.may_load and await read_version(self._client, url) not in self._versions_of(teacher):
            await load_folder(self._client, url, checkpoint, _version_of(checkpoint))
        await check_weights(self._client, url, checkpoint, f"teacher {teacher}")
        self._version, self._loaded = await read_version(self._client, url), teacher

    def _versions_of(self, teacher: str) -> set[str]:
        """What a server of ours says of its weights when they are this teacher's."""
        is_first = teacher == next(iter(self.place.checkpoints))
        return {_version_of(self.place.checkpoints[teacher]), *([INITIAL_VERSION] if is_first else [])}


def _version_of(checkpoint: Path) -> str:
    return str(checkpoint.absolute())
