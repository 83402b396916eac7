"""A process group of this rank with the processes of another job, beside Megatron's own groups.

torch has no public way to make one. This is what SGLang does on its side (srt/utils/common.py:
init_custom_process_group), and it must stay that: the two meet under the keys that torch's helper writes to the store.
"""

from __future__ import annotations

import secrets
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d

from megatron_mopd.mcore import device


class OuterGroupFailed(ConnectionError):
    """The others did not come, or did not take what was sent."""


class OuterGroup:
    """This rank is rank 0 of `size`; the others reach it at `host`:`port` under `name`. Waits end after `timeout_s`."""

    def __init__(self, host: str, size: int, timeout_s: float) -> None:
        self.host, self.size = host, size
        self.name = f"weights-{secrets.token_hex(8)}"  # groups of a trainer that died may be left over there
        self._timeout = timedelta(seconds=timeout_s)
        self._store: TCPStore | None = TCPStore(
            host, 0, size, is_master=True, wait_for_workers=False, timeout=self._timeout
        )
        self._group: dist.ProcessGroup | None = None

    @property
    def port(self) -> int:
        """The system's choice, held from the start: no other process can take it."""
        assert self._store is not None, "closed"
        return self._store.port

    def connect(self) -> None:
        """Return when all others have come. Raises OuterGroupFailed."""
        assert self._store is not None, "closed"
        try:
            self._group, _ = distributed_c10d._new_process_group_helper(
                self.size,
                0,
                [],
                dist.Backend(device.BACKEND),
                PrefixStore(self.name, self._store),
                group_name=distributed_c10d.GroupName(self.name),
                timeout=self._timeout,
            )
        except RuntimeError as error:
            raise OuterGroupFailed(f"no connection: {error}") from error
        distributed_c10d._world.pg_group_ranks[self._group] = {rank: rank for rank in range(self.size)}

    def broadcast(self, tensor: Tensor) -> None:
        """Send the tensor to all others. Raises OuterGroupFailed."""
        try:
            dist.broadcast(tensor, group=self._group, group_src=0)
        except RuntimeError as error:
            raise OuterGroupFailed(f"broadcast broke off: {error}") from error

    def abort(self) -> None:
        """End a broadcast that another thread is in, where the backend can (NCCL; on gloo it times out)."""
        if self._group is not None:
            self._group.abort()

    def close(self) -> None:
        """Hang up. Who still waits on the other side is told so."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
        self._store = None
