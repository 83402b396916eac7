"""One trainer rank's line to all student servers: a process group with them, and buckets of tensors sent through it.

An HTTP request tells a server the names, dtypes and shapes of a bucket; the bucket itself is one broadcast of bytes.
Promise: no server is left waiting by a failure here, and a failure of one ends within the time-out at all.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from megatron_mopd.client import Client, RequestRefused
from megatron_mopd.errors import UserError
from megatron_mopd.mcore import device
from megatron_mopd.mcore.outer_group import OuterGroup, OuterGroupFailed
from megatron_mopd.protocols import EndpointDown
from megatron_mopd.sglang.identity import check_version

_FORGET_SILENCE_S = 10.0

Bucket = list[tuple[str, Tensor]]
Request = Callable[[Client, str], Awaitable[Any]]


@dataclass(frozen=True)
class Server:
    url: str
    num_ranks: int
    started: str
    """Differs for every process that was started at this URL."""

    @classmethod
    def of(cls, url: str, info: dict[str, Any]) -> Server:
        """From its /server_info. Raises UserError where it cannot take broadcasts from this trainer."""
        check_version(url, info)
        if (info["dp_size"], info["pp_size"]) != (1, 1):
            raise UserError(
                f"{url} has dp_size={info['dp_size']}, pp_size={info['pp_size']}; with "
                "sglang.weight_transport=distributed both must be 1"
            )
        if info["device"] != device.DEVICE.type:
            raise UserError(
                f"{url} computes on {info['device']}, the trainer on {device.DEVICE.type}; set "
                "sglang.weight_transport=disk"
            )
        return cls(url, info["tp_size"], str(info["startup_time"]))


class Servers:
    """Requests to several servers at once, from code that is not asynchronous."""

    def __init__(self, timeout_s: float, api_key: str | None) -> None:
        self.timeout_s, self._api_key = timeout_s, api_key

    def at_all(
        self, urls: Iterable[str], request: Request, meanwhile: Callable[[], None] | None = None, stop: Any = None
    ) -> None:
        """Make the request at every server, and call `meanwhile` in a thread. When all are over, raise the first
        failure, deaths before refusals. `stop` is called as soon as there is one, to end `meanwhile`."""

        async def run() -> None:
            async with Client(self.timeout_s, self._api_key) as client:
                tasks = [asyncio.ensure_future(request(client, url)) for url in urls]
                if meanwhile is not None:
                    tasks.append(asyncio.ensure_future(asyncio.to_thread(meanwhile)))
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
                if stop is not None and any(task.exception() for task in done):
                    stop()
                results = await asyncio.gather(*tasks, return_exceptions=True)
            failures = [result for result in results if isinstance(result, BaseException)]
            if failures:
                raise min(failures, key=lambda failure: not isinstance(failure, EndpointDown))

        asyncio.run(run())


class Sender:
    """`connect` it before the first `send`; after a failure of either only `close` is left."""

    def __init__(self, servers: Sequence[Server], through: Servers) -> None:
        self._servers, self._through = servers, through
        self._urls = [server.url for server in servers]
        size = 1 + sum(server.num_ranks for server in servers)
        self._group = OuterGroup(_address_towards(self._urls), size, through.timeout_s)

    def connect(self) -> None:
        """The servers' ranks follow this one, in the order of the servers."""
        group = self._group
        offset_of, offset = {}, 1
        for server in self._servers:
            offset_of[server.url] = offset
            offset += server.num_ranks

        def invite(client: Client, url: str) -> Awaitable[Any]:
            body = {
                "master_address": group.host,
                "master_port": group.port,
                "rank_offset": offset_of[url],
                "world_size": group.size,
                "group_name": group.name,
                "backend": device.BACKEND,
            }
            return client.post(url, "/init_weights_update_group", body)

        self._through.at_all(self._urls, invite, meanwhile=group.connect)

    def send(self, bucket: Bucket) -> None:
        """Return when every server has written the tensors into its parameters."""
        flat = torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in bucket])
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": self._group.name,
            "load_format": "flattened_bucket",
            "flush_cache": False,  # once, when the last owner has sent its last
        }

        def broadcast() -> None:
            try:
                self._group.broadcast(flat)
            except OuterGroupFailed:
                self._group.close()  # so that servers which still wait for it are told
                raise

        self._through.at_all(
            self._urls,
            lambda client, url: client.post(url, "/update_weights_from_distributed", body),
            meanwhile=broadcast,
            stop=self._group.abort,
        )

    def close(self) -> None:
        self._group.close()

        async def forget(client: Client, url: str) -> None:
            try:
                name = {"group_name": self._group.name}
                await client.post(url, "/destroy_weights_update_group", name, _FORGET_SILENCE_S)
            except (EndpointDown, RequestRefused):
                return  # it has died, hangs, or was started again and has no such group

        self._through.at_all(self._urls, forget)


def buckets(tensors: Iterator[tuple[str, Tensor]], num_bytes: int) -> Iterator[Bucket]:
    """Consecutive tensors of one dtype, of at most `num_bytes` together, or one larger tensor alone."""
    bucket: Bucket = []
    filled = 0
    for name, tensor in tensors:
        if bucket and (filled + tensor.nbytes > num_bytes or tensor.dtype != bucket[0][1].dtype):
            yield bucket
            bucket, filled = [], 0
        bucket.append((name, tensor))
        filled += tensor.nbytes
    if bucket:
        yield bucket


def _address_towards(urls: Sequence[str]) -> str:
    """The address of this machine that the servers can reach: the one from which it reaches them."""
    addresses = [_local_address(url) for url in urls]
    return next((address for address in addresses if not address.startswith("127.") and address != "::1"), addresses[0])


def _local_address(url: str) -> str:
    parts = urlsplit(url)
    family, kind, protocol, _, remote = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(remote)  # sends nothing
        return probe.getsockname()[0]
