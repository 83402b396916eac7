"""SGLang's own hash of a tensor, so that the weights of a server can be compared without reading them back.

`POST /weights_checker {"action": "checksum"}` returns one hash per parameter and rank. A server on a CPU hashes the
bytes with SHA-256, one on a GPU with a tiled 32-bit hash; both see the tensor as that rank holds it: in the server's
dtype, fused and sharded as SGLang fuses and shards it.

Sources: sglang 0.5.23, srt/utils/weight_checker.py, srt/managers/mm_utils.py:tensor_hash and
kernels/ops/memory/gpu_tensor_hash.py. Promise (tests/unit/test_checksum.py, tests/sglang/test_identity.py): equal to
the server's, bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_mopd.client import Client
from megatron_mopd.errors import UserError

_TILE_WORDS = 8192
_TILES_AT_ONCE = 512
_SEED = 0x243F6A88
_SEEDS = (np.uint32(_SEED), np.uint32(((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF))
_POSITION_FACTORS = (np.uint32(0x27D4EB2D), np.uint32(0x165667B1))
_POSITION_TURNS = (15, 13)
_U64 = (1 << 64) - 1


@dataclass(frozen=True)
class ServerChecksums:
    """`ranks[i]` maps SGLang's parameter names to hashes; pipeline ranks hold different names, tensor-parallel ranks
    their own part of the same one."""

    device: str
    dtype: torch.dtype
    quantized: bool
    """Projections may be in a format of their own, and are hashed as they come out of it again."""
    ranks: tuple[dict[str, str], ...]

    def of(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> str:
        """The hash that this server gives this tensor if it holds it in `dtype` (None: in its own)."""
        return checksum(tensor.to(dtype or self.dtype), self.device)


async def read_checksums(client: Client, url: str, skip: Sequence[str] = ()) -> ServerChecksums:
    """Without the parameters whose name contains a word of `skip`.

    Raises EndpointDown, or UserError where the server does not hash its weights.
    """
    info = await client.get(url, "/server_info")
    body = {"action": "checksum", "selector": "target", "skip_tensor_list": list(skip) or None}
    reply = await client.post(url, "/weights_checker", body)
    if not isinstance(reply, dict) or "ranks" not in reply:
        raise UserError(f"{url}/weights_checker returned no checksums; SGLang 0.5.23 or newer is needed")
    dtype = info["dtype"] if info["dtype"] != "auto" else "bfloat16"
    return ServerChecksums(
        device=info["device"],
        dtype=getattr(torch, dtype),
        quantized=info["quantization"] is not None,
        ranks=tuple(rank["checksums"] for rank in reply["ranks"]),
    )


def checksum(tensor: torch.Tensor, device: str) -> str:
    """The hash, 16 hexadecimal digits, that a server on `device` ("cpu" or "cuda") gives this tensor.

    The tensor must have the dtype and layout that it has in the server.
    """
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    if device == "cpu":
        return hashlib.sha256(content.data).digest()[:8].hex()
    return f"{_tiled_hash(content):016x}"


def _tiled_hash(content: np.ndarray) -> int:
    """The GPU's: two 32-bit hashes per tile of 8192 words, added up over all tiles as 64-bit numbers."""
    if not len(content):
        return 0
    words = np.pad(content, (0, -len(content) % 4)).view(np.uint32)
    total = 0
    for start in range(0, len(words), _TILES_AT_ONCE * _TILE_WORDS):
        total += _sum_of_tiles(words[start : start + _TILES_AT_ONCE * _TILE_WORDS], start, len(words) * 4)
    total &= _U64
    total ^= total >> 30
    total = total * 0xBF58476D1CE4E5B9 & _U64
    total ^= total >> 27
    total = total * 0x94D049BB133111EB & _U64
    return total ^ total >> 31


def _sum_of_tiles(words: np.ndarray, start: int, total_bytes: int) -> int:
    """Sum of the tile hashes of `words`, which begin at word `start` of a tensor of `total_bytes`."""
    index = np.arange(start, start + len(words), dtype=np.uint64).astype(np.uint32)
    halves = []
    for seed, factor, turn in zip(_SEEDS, _POSITION_FACTORS, _POSITION_TURNS, strict=True):
        position = (index * factor + seed) ^ (index << np.uint32(turn) | index >> np.uint32(32 - turn))
        mixed = _mix(words ^ position)
        tiles = np.add.reduceat(mixed, np.arange(0, len(words), _TILE_WORDS), dtype=np.uint32)
        halves.append(_mix(tiles ^ np.uint32(total_bytes & 0xFFFFFFFF)).astype(np.uint64))
    return int(np.sum(halves[0] << np.uint64(32) | halves[1], dtype=np.uint64))


def _mix(x: np.ndarray) -> np.ndarray:
    """MurmurHash3's finalizer on 32-bit words."""
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    x = (x ^ x >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    return x ^ x >> np.uint32(16)
