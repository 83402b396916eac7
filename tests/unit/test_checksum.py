"""SGLang's hash of a tensor, against values that its own functions gave."""

from __future__ import annotations

import hashlib

import pytest
import torch

from megatron_mopd.sglang import checksum as module
from megatron_mopd.sglang.checksum import checksum

GPU_HASHES = {
    (1, torch.bfloat16): "ce91151c0e9d330e",
    (33, torch.bfloat16): "eb5986971b371f59",
    (64, torch.float32): "64edf579f1c077b4",
    (8192, torch.float32): "8d7a3b135d01974d",
    (24583, torch.float32): "27bfc36a513cadfb",
}
"""gpu_tensor_hash of sglang 0.5.23 in Triton's interpreter, of ramp(length, dtype)."""


def ramp(length: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(length) * 0.25 - 3).to(dtype)


@pytest.mark.parametrize("tiles_at_once", [1, 512])
def test_gpu_hash_equals_the_kernels(monkeypatch: pytest.MonkeyPatch, tiles_at_once: int) -> None:
    monkeypatch.setattr(module, "_TILES_AT_ONCE", tiles_at_once)
    assert {key: checksum(ramp(*key), "cuda") for key in GPU_HASHES} == GPU_HASHES


def test_cpu_hash_is_sha256_of_the_bytes() -> None:
    tensor = ramp(6, torch.float32).reshape(2, 3)
    assert checksum(tensor, "cpu") == hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_one_changed_bit_and_another_order_of_memory_are_seen(device: str) -> None:
    tensor = ramp(9000, torch.float32).reshape(90, 100)
    changed = tensor.clone()
    changed[89, 99] = torch.nextafter(changed[89, 99], torch.tensor(torch.inf))
    assert checksum(tensor, device) != checksum(changed, device)
    assert checksum(tensor, device) != checksum(tensor.T, device)
    assert checksum(tensor, device) == checksum(tensor.T.contiguous().T, device)
