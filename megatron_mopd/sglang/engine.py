"""The student on SGLang servers, as a rollout engine: token ids in, token ids out.

Promises (tests/sglang/test_contract.py, test_rollouts.py, test_failover.py):

- Log-probs are those of softmax(logits / temperature) over the whole vocabulary, before top-p, one per sampled token.
- A server that dies, or gives a request up, costs time and no token: the request goes on from its token log on another
  server, or on the same one when it is back. What was received never changes.
- A segment is of one weight version. A server that says it serves other weights, because it was started again or
  somebody else loaded them, contributes no token; it is loaded anew before it gets work.
- `update_weights` ends what is in flight at the token that it has reached, as segments that finish with "abort"; what
  has no token yet waits for the new weights. Nothing is sampled until every server has loaded them and emptied its
  prefix cache; if one cannot, nothing is sampled until an update succeeds.
- With `retain_kv` the prefix cache survives an update. A trajectory's keys and values are filed under the version that
  it began with (SGLang's `extra_key`), so that it finds its own again and nobody else's of older weights; what it
  samples then is marked. SGLang evicts what has not been used for longest, to the host's memory where it has a
  hierarchical cache.
- A response ends at a stop id of the request and not at the model's own end id. SGLang's `ignore_eos` would ignore
  both; so a response that the model's end id has cut is continued, at the price of one more request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from megatron_mopd.client import Client
from megatron_mopd.config import Config, SGLang
from megatron_mopd.errors import UserError
from megatron_mopd.fleet import Fleet, Patience
from megatron_mopd.hf_folder import read_hf_config
from megatron_mopd.protocols import EndpointDown, KvUse, SampleRequest
from megatron_mopd.servers.launch import check_keeper, endpoints
from megatron_mopd.sglang.arguments import api_key
from megatron_mopd.sglang.generation import Generation, Run
from megatron_mopd.sglang.identity import LOADING, SAMPLING, SCORING, check_server
from megatron_mopd.sglang.placement import student_servers
from megatron_mopd.sglang.reply_log import ReplyLog
from megatron_mopd.sglang.served_weights import FetchWeights, ServedWeights
from megatron_mopd.sglang.supported import LOSES_ROUTES
from megatron_mopd.sglang.weights import sampled_name, trained_name, version_name
from megatron_mopd.types import Segment


def student_engine(config: Config, fetch_weights: FetchWeights | None) -> SGLangEngine:
    """On the given servers, or on those that are kept for the run. `fetch_weights` None: nothing is trained."""
    folder, urls = config.run.folder, config.sglang.student.urls
    if names := student_servers(config):
        started = endpoints(folder)
        urls = tuple(started[name] for name in names)
    settings = config.sglang
    if config.quantization.audit:
        settings = settings.model_copy(update={"check_weights": True})
    return SGLangEngine(
        urls,
        config.student.checkpoint,
        settings,
        run=sampled_name(config) if fetch_weights is None else trained_name(config),
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        router_replay=config.rollout.router_replay,
        min_input_tokens=config.rollout.max_response_tokens,
        api_key=api_key(config),
        fetch_weights=fetch_weights,
        check_hope=(lambda: check_keeper(folder)) if names else (lambda: None),
        retain_kv=config.rollout.partial.kv == "retain",
    )


class SGLangEngine:
    """Implements protocols.RolloutEngine, and beyond it `abort`, `pause` and `resume`.

    Before the first `update_weights`, the servers are given `checkpoint` when something is to be sampled. `run` tells
    the weight versions of this run from those of others. `fetch_weights()` gives weights that were broadcast to a
    server that was not there. `check_hope()` raises UserError where a dead server will not come back.
    """

    def __init__(
        self,
        urls: Sequence[str],
        checkpoint: Path,
        settings: SGLang,
        *,
        run: str,
        temperature: float = 1.0,
        top_p: float = 1.0,
        weight_version: int = 0,
        router_replay: bool = False,
        min_input_tokens: int = 1,
        api_key: str | None = None,
        fetch_weights: FetchWeights | None = None,
        check_hope: Callable[[], None] = lambda: None,
        retain_kv: bool = False,
    ):
        self.weight_version, self.kv = weight_version, KvUse()
        self._run, self._retain_kv = run, retain_kv
        self._checkpoint, self._min_input_tokens = checkpoint, min_input_tokens
        hf_config = read_hf_config(checkpoint)
        self._vocab_size: int = hf_config["vocab_size"]
        self._routed_shape = None
        if router_replay:
            self._routed_shape = (hf_config["num_hidden_layers"], hf_config["num_experts_per_tok"])
        self._max_tokens: dict[str, int] = {}
        """Of a request with its response, by server."""
        self._client = Client(settings.request_timeout_s, api_key)
        self._weights = ServedWeights(self._client, run, settings.check_weights, fetch_weights, forget=not retain_kv)
        self._generation = Generation(self._client, temperature, top_p)
        patience = Patience(
            settings.start_timeout_s, "sglang.start_timeout_s", settings.recovery_timeout_s, "sglang.recovery_timeout_s"
        )
        self._fleet = Fleet(
            "student", urls, self._prepare, patience, max_requests=settings.max_requests, check_hope=check_hope
        )
        self._runs: set[Run] = set()
        self._paused = False
        self._first_weights, self._update = asyncio.Lock(), asyncio.Lock()
        self._may_sample = asyncio.Event()
        self._may_sample.set()

    async def start(self) -> None:
        await self._fleet.start()

    async def generate(self, request: SampleRequest) -> Segment:
        """Raises UserError, with the trajectory's name, where no server can sample it."""
        self._check(request)
        run = Run(request, self._new_log)
        run.task = asyncio.create_task(self._complete(run))
        self._runs.add(run)
        try:
            await asyncio.wait({run.task})
        finally:
            run.task.cancel()
            self._runs.discard(run)
        self._count_kv(run)
        if not (run.over and run.task.cancelled()):
            run.task.result()
        return run.log.segment

    async def update_weights(self, folder: Path | None, weight_version: int) -> None:
        """`folder` None: the servers have the weights already; one that has not loads them from a folder that
        `fetch_weights` gives, and gets no work without.

        Raises ValueError for a version that goes backwards, UserError where a server cannot serve it.
        """
        if weight_version < self.weight_version:
            raise ValueError(f"weights of version {weight_version} offered after version {self.weight_version}")
        async with self._nothing_in_flight(), self._weights.update(folder, weight_version):
            if not self._retain_kv:
                self._fleet.forget_prefixes()
            await self._everywhere(self._weights.load)
            if folder is None and not self._fleet.urls and not self._weights.can_be_fetched:
                raise UserError(f"no student server serves {self._weights.name!r}, which was to be broadcast to them")
            self.weight_version = weight_version

    async def interrupt(self) -> None:
        """Everything that is in flight ends at the token that it has reached."""
        if self._paused:
            await self._everywhere(self._continue)  # a server that was paused in place ends nothing
        runs = list(self._runs)
        for run in runs:
            run.aborted = True
        await self._generation.take_off(runs, lambda _: {"abort_all": True})
        await asyncio.gather(*[run.task for run in runs], return_exceptions=True)
        if self._retain_kv:
            self.kv.retained += sum(len(run.request.token_ids) + len(run.log.token_ids) for run in runs)

    async def abort(self, trajectory_id: str) -> None:
        """Let its `generate` return what it has, with finish_reason "abort"."""
        runs = [run for run in self._runs if run.request.trajectory_id == trajectory_id]
        for run in runs:
            run.aborted = True
        await self._generation.take_off(runs, lambda run: {"rid": run.request_id})

    async def pause(self, mode: Literal["abort", "retract", "in_place"]) -> None:
        """Sample nothing until `resume`.

        abort: what is in flight returns the tokens that it has, and waits if it has none. retract: it waits in its
        server, which frees its key-value cache. in_place: it waits with its cache.
        """
        self._paused = True
        self._may_sample.clear()
        if mode == "abort":
            await self._cut_all()
        await self._everywhere(lambda url: self._client.post(url, "/pause_generation", {"mode": mode}))

    async def resume(self) -> None:
        self._paused = False
        await self._everywhere(self._continue)
        if not self._update.locked():
            self._may_sample.set()

    async def close(self) -> None:
        """Abort what is in flight; callers who still wait are cancelled. The servers are left to others."""
        if self._paused:
            await self._everywhere(self._continue)
        tasks = [run.task for run in self._runs]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._generation.close()
        await self._fleet.close()
        await self._client.close()

    def _check(self, request: SampleRequest) -> None:
        name, ids = request.trajectory_id, request.token_ids
        if not ids or request.max_new_tokens < 1:
            raise ValueError(f"{name}: cannot sample {request.max_new_tokens} tokens after {len(ids)}")
        for token in (min(ids), max(ids)):
            if not 0 <= token < self._vocab_size:  # SGLang dies of it
                raise UserError(f"{name}: {token} is no token of the student, whose vocabulary has {self._vocab_size}")
        most = min(self._max_tokens.values())
        if len(ids) + request.max_new_tokens > most:
            raise UserError(
                f"{name}: {len(ids)} + {request.max_new_tokens} tokens are more than the {most} that a student server "
                "takes; raise its context_length or max_total_tokens, or lower rollout.max_response_tokens"
            )

    def _new_log(self, request: SampleRequest) -> ReplyLog:
        name = self._weights.name or ""
        kv_name = None
        if self._retain_kv:
            begun_at = self.weight_version if request.begun_at is None else request.begun_at
            kv_name = version_name(self._run, begun_at)
        return ReplyLog(request, self.weight_version, name, self._vocab_size, self._routed_shape, kv_name)

    def _count_kv(self, run: Run) -> None:
        """Of a trajectory that goes on: everything but its last token could be there."""
        if self._retain_kv and run.request.begun_at is not None and run.log.cached_tokens is not None:
            self.kv.reused += run.log.cached_tokens
            self.kv.evicted += max(0, len(run.request.token_ids) - 1 - run.log.cached_tokens)

    async def _ensure_weights(self) -> None:
        async with self._first_weights:
            if self._weights.name is None:
                await self.update_weights(self._checkpoint, self.weight_version)

    async def _complete(self, run: Run) -> None:
        """Return when the run is over."""
        name = run.request.trajectory_id
        if self._weights.name is None:
            await self._ensure_weights()
        while not run.over:
            while not self._may_sample.is_set():
                await self._may_sample.wait()
            if self._weights.failure:
                raise UserError(f"{name}: {self._weights.failure}")
            await self._fleet.run(name, lambda url: self._sample_on(run, url), key=name, prefix=run.request.token_ids)

    async def _sample_on(self, run: Run, url: str) -> None:
        if self._may_sample.is_set():  # else it got its turn in the middle of an update
            run.begin()
            await self._generation.sample(run, url)

    async def _cut_all(self) -> None:
        """End everything on a server, and everything that has tokens; leave the rest where it waits."""
        if self._paused:
            await self._everywhere(self._continue)  # a server that was paused in place ends nothing
        runs = [run for run in self._runs if run.url is not None or run.log.token_ids]
        for run in runs:
            run.cut = True
        await self._generation.take_off(runs, lambda _: {"abort_all": True})

    @asynccontextmanager
    async def _nothing_in_flight(self) -> AsyncIterator[None]:
        async with self._update:
            self._may_sample.clear()
            try:
                await self._cut_all()
                yield
            finally:
                if not self._paused:
                    self._may_sample.set()

    async def _everywhere(self, act: Callable[[str], Awaitable[Any]]) -> None:
        """On every server that is up; one that dies of it recovers by itself. Raises the first other error."""
        urls = self._fleet.urls
        results = await asyncio.gather(*[act(url) for url in urls], return_exceptions=True)
        for url, result in zip(urls, results, strict=True):
            if isinstance(result, EndpointDown):
                self._fleet.mark_down(url, result.reason)
            elif isinstance(result, BaseException):
                raise result

    async def _prepare(self, url: str) -> None:
        """Bring a server that was away to the weights of now."""
        arguments = {"incremental_streaming_output": True}
        if self._routed_shape is not None:
            arguments |= {"enable_return_routed_experts": True, LOSES_ROUTES: False}
        facts = await check_server(
            self._client,
            url,
            self._checkpoint,
            endpoints=(*SCORING, *LOADING, *SAMPLING),
            arguments=arguments,
            min_input_tokens=self._min_input_tokens,
        )
        self._max_tokens[url] = facts.max_input_tokens
        await self._continue(url)  # whoever used it before may have left it paused
        await self._generation.check_temperature(url)
        await self._weights.catch_up(url)

    async def _continue(self, url: str) -> None:
        await self._client.post(url, "/continue_generation", {})
