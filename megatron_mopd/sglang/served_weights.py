"""The weights that every student server must serve now, and how one that was away is brought to them.

Promises (tests/sglang/test_rollouts.py, test_failover.py): between the beginning of an update and its success there is
a `failure`, and no server is taken back; a server that returns, whatever it serves, has the weights of now before it
gets work.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_mopd.client import Client
from megatron_mopd.errors import UserError
from megatron_mopd.protocols import EndpointDown
from megatron_mopd.sglang.weights import check_folder, load_folder, read_version, version_name

FetchWeights = Callable[[], Awaitable[tuple[int, Path]]]
"""The version that is being sampled, and a folder with its weights."""


@dataclass(frozen=True)
class _Weights:
    """`folder` None: they were broadcast to the servers."""

    name: str
    folder: Path | None


class ServedWeights:
    """`run` tells the versions of this run from those of others. `fetch` makes a folder of weights that were
    broadcast, for a server that was not there. `forget`: with new weights the prefix cache is emptied."""

    def __init__(self, client: Client, run: str, check: bool, fetch: FetchWeights | None, forget: bool = True):
        self.failure: str | None = None
        """Why nothing may be sampled."""
        self._client, self._run, self._check, self._fetch, self._forget = client, run, check, fetch, forget
        self._weights: _Weights | None = None
        self._fetched: _Weights | None = None
        self._fetching = asyncio.Lock()

    @property
    def name(self) -> str | None:
        """What the servers call them; None before the first update."""
        return self._weights.name if self._weights is not None else None

    @property
    def can_be_fetched(self) -> bool:
        return self._fetch is not None

    @asynccontextmanager
    async def update(self, folder: Path | None, version: int) -> AsyncIterator[None]:
        """From now on these; every server that is up is to be given them inside."""
        self.failure = f"the student servers could not be given version {version} of the weights"
        self._weights = _Weights(version_name(self._run, version), folder)
        yield
        self.failure = None

    async def load(self, url: str) -> None:
        """Have the server serve them. Raises UserError where it cannot, EndpointDown where it must wait for them."""
        weights = self._weights
        assert weights is not None
        folder = weights.folder
        if folder is None and await read_version(self._client, url) != weights.name:
            folder = await self._fetched_folder(url, weights)
        if folder is not None:
            await load_folder(self._client, url, folder, weights.name, self._forget)
        if self._check:
            await check_folder(self._client, url, folder or await self._fetched_folder(url, weights))

    async def catch_up(self, url: str) -> None:
        """Return when the server serves the weights of now. Raises EndpointDown where it must wait for the next."""
        weights = None
        while weights is not self._weights:
            weights = self._weights
            if self.failure:
                raise EndpointDown(url, self.failure)
            if weights is None or await read_version(self._client, url) == weights.name:
                continue
            try:
                await self.load(url)
            except UserError as error:  # the folder may be gone, as the next weights are there
                raise EndpointDown(url, str(error)) from error

    async def _fetched_folder(self, url: str, weights: _Weights) -> Path:
        """One folder for all servers that missed the broadcast of `weights`."""
        if self._fetch is None:
            raise EndpointDown(url, f"has not got {weights.name!r}, which was broadcast")
        async with self._fetching:
            if self._fetched is None or self._fetched.name != weights.name:
                version, folder = await self._fetch()
                self._fetched = _Weights(version_name(self._run, version), folder)
            fetched = self._fetched
        if fetched.folder is None or fetched.name != weights.name:
            raise EndpointDown(url, f"{fetched.name!r} has taken the place of {weights.name!r}")
        return fetched.folder
