"""Which tensors tell one checkpoint from another on a server of any layout: the hashes of its ranks are made up here,
as SGLang shards and casts."""

from __future__ import annotations

import pytest
import torch

from megatron_mopd.sglang.checksum import ServerChecksums, checksum
from megatron_mopd.sglang.identity import _fingerprint, _is_served

OUTPUT = "model.layers.0.self_attn.o_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"
TENSOR = (torch.arange(64) * 0.37 - 9).reshape(4, 16)


def served(name: str, parts: list[torch.Tensor], device: str = "cpu") -> ServerChecksums:
    """Ranks that hold one part each; a rank of another pipeline stage comes last."""
    ranks = [{name: checksum(part, device)} for part in parts]
    return ServerChecksums(device, torch.bfloat16, quantized=False, ranks=(*ranks, {"other": "0" * 16}))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_a_server_of_any_layout_and_dtype_is_recognized(device: str, parts: int) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        columns = list(TENSOR.to(dtype).chunk(parts, dim=1))
        assert _is_served(served(OUTPUT, columns, device), OUTPUT, TENSOR)
        assert _is_served(served(OUTPUT, columns * 2, device), OUTPUT, TENSOR), "two data-parallel ranks of each"
        assert not _is_served(served(OUTPUT, columns, device), OUTPUT, TENSOR + 1)


def test_a_whole_tensor_must_be_the_same_on_every_rank() -> None:
    norm = TENSOR[0].bfloat16()
    assert _is_served(served(NORM, [norm, norm]), NORM, TENSOR[0])
    assert not _is_served(served(NORM, [norm, norm + 1]), NORM, TENSOR[0])


def test_what_servers_fuse_or_split_over_experts_is_left_out() -> None:
    layer = "model.layers.{}."
    kept = ["input_layernorm.weight", "mlp.gate.e_score_correction_bias", "mlp.gate.weight", "self_attn.q_norm.weight"]
    fused = ["mlp.experts.0.gate_proj.weight", "mlp.gate_proj.weight", "self_attn.q_proj.weight"]
    names = [layer.format(i) + name for i in (0, 2, 10) for name in (*kept, *fused, "self_attn.o_proj.weight")]
    expected = [layer.format(i) + name for i in (0, 2, 10) for name in kept]
    outputs = [layer.format(i) + "self_attn.o_proj.weight" for i in (0, 10)]
    assert _fingerprint([*names, "model.norm.weight"]) == [*expected, "model.norm.weight", *outputs]
