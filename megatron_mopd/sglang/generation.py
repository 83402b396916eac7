"""One trajectory's way through the servers: ask, listen, ask again from where its log is, until it is over.

Promise: whatever ends the listening, the server is told, so that it does not go on for nobody.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from typing import Any

from megatron_mopd.client import Client
from megatron_mopd.errors import UserError
from megatron_mopd.protocols import EndpointDown, SampleRequest
from megatron_mopd.sglang.reply_log import ReplyLog

STREAM_INTERVAL = 32
"""Tokens per streamed message: what a dying server may take along of each request, against JSON per token."""

_ABORT_AGAIN_S = 0.5
"""An abort that overtakes its request on the way is lost, so it is sent until the request has ended."""

_SAMPLING = {
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "n": 1,
    "ignore_eos": False,  # it would ignore the stop ids too
    "stream_interval": STREAM_INTERVAL,
}
"""Said with every request: a server may have other preferences (--preferred-sampling-params)."""


class Run:
    """One `generate` call on its way. `aborted`: it ends with what it has. `cut`: the same, if it has anything."""

    def __init__(self, request: SampleRequest, new_log: Callable[[SampleRequest], ReplyLog]):
        self.request, self._new_log = request, new_log
        self.log = new_log(request)
        self.aborted = self.cut = False
        self.url: str | None = None
        """The server that it is on."""
        self.request_id = ""
        self.left = asyncio.Event()
        """Set while it is on no server."""
        self.left.set()
        self.task: asyncio.Task[None]

    @property
    def over(self) -> bool:
        return self.aborted or (self.cut and bool(self.log.token_ids)) or self.log.ended is not None

    def begin(self) -> None:
        """Nothing is sampled yet: it may take the weights of now."""
        self.cut = False
        if not self.log.token_ids:
            self.log = self._new_log(self.request)


class Generation:
    """What all runs of an engine share."""

    def __init__(self, client: Client, temperature: float, top_p: float):
        self._client = client
        self._sampling = {**_SAMPLING, "temperature": temperature, "top_p": top_p}
        self._farewells: set[asyncio.Task[None]] = set()

    async def check_temperature(self, url: str) -> None:
        """Raise UserError where the server returns log-probs of another temperature than it samples at.

        The spread of the likeliest tokens' log-probs must shrink with the temperature.
        """
        temperature = self._sampling["temperature"]
        if temperature != 1.0:
            at_one, here = await self._spread(url, 1.0), await self._spread(url, temperature)
            if abs(here - at_one) < abs(here - at_one / temperature):
                raise UserError(
                    f"server {url} returns log-probs that ignore the temperature; start it without "
                    "SGLANG_RETURN_ORIGINAL_LOGPROB in its environment, or set rollout.temperature=1"
                )

    async def _spread(self, url: str, temperature: float) -> float:
        sampling = {**self._sampling, "temperature": temperature, "max_new_tokens": 1}
        body = {"input_ids": [0], "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 20}
        ((likeliest, *_, last),) = (await self._client.post(url, "/generate", body))["meta_info"]["output_top_logprobs"]
        return likeliest[0] - last[0]

    async def sample(self, run: Run, url: str) -> None:
        """Return when the run is over or cut. Raises EndpointDown where the server cannot finish it."""
        run.url = url
        run.left.clear()
        try:
            while not (run.over or run.cut):
                await self._listen(run, url)
        except EndpointDown:
            if not (run.aborted or run.cut):
                raise
        finally:
            run.url = None
            run.left.set()

    async def abort(self, url: str, what: Mapping[str, Any]) -> None:
        """`what`: {"rid": ...} or {"abort_all": True}."""
        with suppress(EndpointDown):  # then it has stopped anyway
            await self._client.post(url, "/abort_request", what)

    async def take_off(self, runs: Iterable[Run], order: Callable[[Run], dict[str, Any]]) -> None:
        """Return when none of these aborted or cut runs is on a server. `order(run)` is what its server is told."""
        for run in runs:
            if run.url is None and run.over:
                run.task.cancel()
        while runs := [run for run in runs if run.url is not None]:
            orders = {(run.url, *order(run).items()): (run.url, order(run)) for run in runs if run.url is not None}
            await asyncio.gather(*[self.abort(url, what) for url, what in orders.values()])
            waits = [asyncio.create_task(run.left.wait()) for run in runs]
            await asyncio.wait(waits, timeout=_ABORT_AGAIN_S)
            for wait in waits:
                wait.cancel()

    async def close(self) -> None:
        await asyncio.gather(*self._farewells)

    async def _listen(self, run: Run, url: str) -> None:
        """One request, until the server ends it."""
        run.request_id = uuid.uuid4().hex  # all of one length: SGLang aborts every id that begins with the given one
        body = run.log.continuation()
        body["rid"] = run.request_id
        body["sampling_params"] |= self._sampling
        finished = False
        try:
            async with aclosing(self._client.stream(url, "/generate", body)) as replies:
                async for reply in replies:
                    finished = run.log.add(reply, url)
        finally:
            if not finished:
                self._say_farewell(url, run.request_id)
        if not finished:
            raise EndpointDown(url, f"ended the stream of {run.request.trajectory_id} in the middle")

    def _say_farewell(self, url: str, request_id: str) -> None:
        task = asyncio.create_task(self.abort(url, {"rid": request_id}))
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)
