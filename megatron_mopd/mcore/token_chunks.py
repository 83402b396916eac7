"""The hidden states of a micro-batch, a chunk of tokens at a time, and the way back for their gradients.

Under sequence parallelism each rank has a slice of the tokens. A chunk is then a piece of every rank's slice: it is
gathered while the chunk before it is worked on, and its gradient is summed over the ranks back into the slices.
Without, all ranks have all tokens, and the gradient is summed in place. Either way no rank holds more of the others'
than two chunks.

Shape suffixes: T packed tokens, t this rank's own of them (T without sequence parallelism), c those of a chunk, D
width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Chunk(NamedTuple):
    own: slice
    """Among this rank's t tokens."""
    index_c: Tensor
    """Among the T tokens."""
    hidden_cD: Tensor


class TokenChunks:
    """`size` is the number of tokens of a chunk, at most, but one of each rank's slice at least; the same on all ranks
    of `group` (None: this one alone)."""

    def __init__(
        self,
        hidden_tD: Tensor,
        size: int,
        group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        self.hidden_tD = hidden_tD
        self.group = group if group is not None and group.size() > 1 else None
        self.parts = self.group.size() if self.group is not None and sequence_parallel else 1
        own = len(hidden_tD)
        self.num_tokens = own * self.parts
        most = max(1, size // self.parts)
        count = max(1, -(-own // most))
        length = max(1, -(-own // count))
        self.slices = [slice(start, min(start + length, own)) for start in range(0, own, length)]
        self._pending: dist.Work | None = None
        self._sent: Tensor | None = None

    def __iter__(self) -> Iterator[Chunk]:
        yield from self.chunks(self.slices)

    def chunks(self, slices: Sequence[slice]) -> Iterator[Chunk]:
        """Some of them."""
        following = self._gather(slices[0]) if slices else None
        for number, own in enumerate(slices):
            assert following is not None
            hidden_cD, gathering = following
            if gathering is not None:
                gathering.wait()
            following = self._gather(slices[number + 1]) if number + 1 < len(slices) else None
            yield Chunk(own, self.index(own), hidden_cD)

    def index(self, own: slice) -> Tensor:
        """The places among the T tokens of the chunk that is at `own` of each rank's slice."""
        of_own = torch.arange(own.start, own.stop, device=self.hidden_tD.device)
        starts = torch.arange(self.parts, device=of_own.device) * len(self.hidden_tD)
        return (starts[:, None] + of_own).flatten()

    def gradient(self, grad_tD: Tensor, own: slice) -> Tensor:
        """Where the float32 gradient [c, D] of a chunk is formed before `reduce`."""
        if self.parts == 1:
            return grad_tD[own]
        return grad_tD.new_empty((own.stop - own.start) * self.parts, grad_tD.shape[1])

    def reduce(self, grad_cD: Tensor, grad_tD: Tensor, own: slice) -> None:
        """Begin to add up the gradient of all ranks into `grad_tD`; one at a time is under way."""
        if self.group is None:
            return
        self.finish()
        if self.parts == 1:
            self._pending = dist.all_reduce(grad_cD, group=self.group, async_op=True)
        else:
            self._pending = dist.reduce_scatter_tensor(grad_tD[own], grad_cD, group=self.group, async_op=True)
        self._sent = grad_cD

    def finish(self) -> None:
        """Wait for the gradient that is under way."""
        if self._pending is not None:
            self._pending.wait()
        self._pending = self._sent = None

    def _gather(self, own: slice) -> tuple[Tensor, dist.Work | None]:
        hidden_cD = self.hidden_tD[own]
        if self.parts == 1:
            return hidden_cD, None
        all_cD = hidden_cD.new_empty(len(hidden_cD) * self.parts, hidden_cD.shape[1])
        return all_cD, dist.all_gather_into_tensor(all_cD, hidden_cD.contiguous(), group=self.group, async_op=True)
