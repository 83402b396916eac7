"""New weights to the rollout engine over the network: each rank that owns weights broadcasts them to all servers.

Run by every trainer rank. Rank 0 pauses the servers and opens the update; the owners take turns, as a server can
receive from one at a time; rank 0 closes the update, and the servers generate again. What is sent are Hugging Face
tensors, in buckets, never pickled, and never a whole model on one rank. Process groups live as long as the same servers
do.

Promises (tests/sglang/test_sync.py): a server says that it serves a version only if it got every tensor of it and holds
nothing that older weights computed. A server that does not answer is left out, with a line on stderr; its old version
tells the engine. One that dies in the middle is noticed when its connections close, one that hangs after
sglang.request_timeout_s; then everything is sent once more, to the others.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_mopd.client import Client, RequestRefused
from megatron_mopd.config import Config
from megatron_mopd.errors import UserError
from megatron_mopd.mcore.learner import Learner
from megatron_mopd.mcore.stream import BUCKET_BYTES, HfStream
from megatron_mopd.protocols import EndpointDown
from megatron_mopd.servers.launch import endpoints
from megatron_mopd.sglang.arguments import api_key
from megatron_mopd.sglang.placement import student_servers
from megatron_mopd.sglang.sender import Sender, Server, Servers, buckets
from megatron_mopd.sglang.weights import begin_update, end_update, trained_name, version_name

_PROBE_SILENCE_S = 60.0
_PROBE_INTERVAL_S = 0.5

Result = TypeVar("Result")


class _BrokenOff(Exception):
    """A server died or would not go on. Raised on every rank."""


class Broadcaster:
    """Implements build.Publisher. One for each rank of the trainer; `publish` is collective."""

    def __init__(self, config: Config, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.num_left_out = 0
        """Servers that did not get the last version; known on rank 0."""
        self._config, self._bucket_bytes = config, bucket_bytes
        self._requests = Servers(config.sglang.request_timeout_s, api_key(config))
        self._stream: HfStream | None = None
        self._published = False
        self._servers: list[Server] = []
        self._sender: Sender | None = None
        """To all of `_servers`, where this rank owns weights."""

    def publish(self, learner: Learner) -> None:
        """Bring the weights of `learner.step` to the student's servers.

        Raises the same UserError on every rank where no server is left, or where two attempts broke off.
        """
        learner.sync_params()
        self._stream = self._stream or HfStream(
            learner.models, self._config.student.checkpoint, learner.experts.value_of
        )
        version = version_name(trained_name(self._config), learner.step)
        try:
            self._attempt(self._stream, version)
        except _BrokenOff as first:
            if dist.get_rank() == 0:
                _warn(f"sending the weights of step {learner.step} broke off ({first}); once more")
            self.close()
            try:
                self._attempt(self._stream, version)
            except _BrokenOff as error:
                raise UserError(f"the servers did not take the weights of step {learner.step}: {error}") from None
        self._published = True

    def close(self) -> None:
        """Leave the servers' groups."""
        sender, self._sender, self._servers = self._sender, None, []
        if sender is not None:
            sender.close()

    def _attempt(self, stream: HfStream, version: str) -> None:
        servers = self._on(0, self._find_servers)
        if servers != self._servers:
            self.close()
            self._servers = servers
            for owner in stream.owners:
                self._on(owner, self._connect)
        self._on(0, lambda: self._at_all(begin_update))
        for owner in stream.owners:
            self._send(stream, owner)
        forget = self._config.rollout.partial.kv == "recompute"
        self._on(0, lambda: self._at_all(lambda client, url: end_update(client, url, version, forget)))

    def _find_servers(self) -> list[Server]:
        """Those that answer. Waits for all of them at first, as they may just be starting; later for one of them."""
        table = self._config.sglang
        patience_s = table.recovery_timeout_s if self._published else table.start_timeout_s
        deadline = time.monotonic() + patience_s
        urls = self._urls()
        found, reasons = self._look(urls)
        while reasons and not (found and self._published) and time.monotonic() < deadline:
            time.sleep(_PROBE_INTERVAL_S)
            found, reasons = self._look(self._urls())
        self.num_left_out = len(reasons)
        if not found:
            raise UserError(f"no server took the weights within {patience_s:g} s: {'; '.join(reasons)}")
        for reason in reasons:
            _warn(f"{reason}; it gets no weights until it is back")
        return sorted(found, key=lambda server: urls.index(server.url))

    def _urls(self) -> Sequence[str]:
        """They stay the same. Raises UserError where nobody keeps the servers any more."""
        if not (names := student_servers(self._config)):
            return self._config.sglang.student.urls
        url_of = endpoints(self._config.run.folder)
        return [url_of[name] for name in names]

    def _look(self, urls: Sequence[str]) -> tuple[list[Server], list[str]]:
        """Servers that answer, and why the others do not."""
        found: list[Server] = []
        reasons: list[str] = []
        silence_s = min(_PROBE_SILENCE_S, self._config.sglang.request_timeout_s)

        async def look(client: Client, url: str) -> None:
            try:
                found.append(Server.of(url, await client.get(url, "/server_info", silence_s)))
            except EndpointDown as error:
                reasons.append(str(error))

        self._requests.at_all(urls, look)
        return found, reasons

    def _connect(self) -> None:
        self._sender = Sender(self._servers, self._requests)
        self._sender.connect()

    def _send(self, stream: HfStream, owner: int) -> None:
        """The turn of one owner. The other ranks take part in its gathers, whatever becomes of the sending."""
        tensors = stream.of(owner)

        def send() -> None:
            assert self._sender is not None
            try:
                for bucket in buckets(tensors, self._bucket_bytes):
                    self._sender.send(bucket)
            finally:
                deque(tensors, maxlen=0)

        if dist.get_rank() != owner:
            deque(tensors, maxlen=0)
        self._on(owner, send)

    def _at_all(self, request: Any) -> None:
        self._requests.at_all([server.url for server in self._servers], request)

    def _on(self, rank: int, action: Callable[[], Result]) -> Result:
        """Do it on one rank. Its result, or its failure, on every rank: _BrokenOff or UserError."""
        outcome: list[Any] = [None]
        if dist.get_rank() == rank:
            try:
                outcome = [(action(), None)]
            except (ConnectionError, RequestRefused) as error:
                outcome = [(None, _BrokenOff(str(error)))]
            except UserError as error:
                outcome = [(None, error)]
        dist.broadcast_object_list(outcome, src=rank)
        result, failure = outcome[0]
        if failure is not None:
            raise failure
        return result


def _warn(line: str) -> None:
    print(f"mopd: {line}", file=sys.stderr, flush=True)
