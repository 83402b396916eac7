"""The layers that stand in for Transformer Engine's, against the plain formulas."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import Pools

LENGTHS = ((5, 16, 1, 13), (8, 8), (7,), (40, 3, 3, 3, 3), (33, 130, 5, 64, 65, 2))
HEADS = ((4, 4, 16, 16), (4, 2, 16, 16), (4, 4, 24, 16))
"""(query heads, key-value heads, width of queries and keys, width of values): plain, grouped, MLA."""


def random_inputs(lengths: tuple[int, ...], heads: tuple[int, int, int, int]) -> list[torch.Tensor]:
    """query [T, h, d], key [T, g, d], value [T, g, e], and a gradient of the output [T, h * e]."""
    h, g, d, e = heads
    generator = torch.Generator().manual_seed(1)
    shapes = ((h, d), (g, d), (g, e), (h * e,))
    return [torch.randn(sum(lengths), *shape, generator=generator) for shape in shapes]


def attention_one_by_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grad: torch.Tensor, lengths: tuple[int, ...]
) -> list[torch.Tensor]:
    """softmax(q k' / sqrt(d) + causal mask) v of each sequence alone, in float64; output and three gradients."""
    inputs = [x.double().requires_grad_() for x in (query, key, value)]
    outputs = []
    for q, k, v in zip(*(x.split(lengths) for x in inputs), strict=True):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khe->qhe", weights, v).flatten(1))
    output = torch.cat(outputs)
    return [output.detach(), *torch.autograd.grad(output, inputs, grad.double())]


def local_attention(lengths: tuple[int, ...], heads: tuple[int, int, int, int], padded_to: int) -> list[torch.Tensor]:
    """The same from LocalCoreAttention on this context-parallel rank: [output, d query, d key, d value], own tokens."""
    import torch.distributed as dist

    from megatron_mopd.mcore.local_layers import LocalCoreAttention

    # isort: split
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    cp, rank = dist.get_world_size(), dist.get_rank()
    config: Any = SimpleNamespace(multi_latent_attention=False, attention_dropout=0.0)
    groups: Any = SimpleNamespace(tp=None, cp=dist.group.WORLD)
    attention = LocalCoreAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups)
    padded = [-(-n // padded_to) * padded_to for n in lengths]
    cu = torch.tensor([0, *torch.tensor(padded).cumsum(0)], dtype=torch.int32)
    longest = max(padded)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    here = torch.cat(
        [
            torch.cat([c for i, c in enumerate(torch.arange(a, b).chunk(2 * cp)) if i in (rank, 2 * cp - 1 - rank)])
            for a, b in zip(cu.tolist(), cu[1:].tolist(), strict=False)
        ]
    )
    real = torch.cat([torch.arange(n) + a for n, a in zip(lengths, cu.tolist(), strict=False)])
    spread = [x.new_zeros(int(cu[-1]), *x.shape[1:]).index_copy(0, real, x) for x in random_inputs(lengths, heads)]
    query, key, value, grad = (x[here] for x in spread)
    inputs = [x.requires_grad_() for x in (query, key, value)]
    output = attention(*inputs, None, packed_seq_params=packed)
    result = [output.detach(), *torch.autograd.grad(output, inputs, grad)]
    whole = [torch.zeros(int(cu[-1]), *x.shape[1:]).index_copy(0, here, x) for x in result]
    for x in whole:
        dist.all_reduce(x)  # every place of the pack is on one rank
    return [x[real] for x in whole]


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("heads", HEADS)
def test_packed_attention_equals_one_sequence_at_a_time(cp: int, lengths, heads, ranks: Pools):
    query, key, value, grad = random_inputs(lengths, heads)
    want = attention_one_by_one(query, key, value, grad, lengths)
    for of_rank in ranks(cp)(local_attention, lengths, heads, 2 * cp if cp > 1 else 1):
        for got, expected in zip(of_rank, want, strict=True):
            torch.testing.assert_close(got.double(), expected, atol=2e-6, rtol=1e-5)


def work(lengths: tuple[int, ...]) -> tuple[int, int]:
    """Query-key pairs that a packed attention works on, and elements of its largest index map or mask."""
    import torch.distributed as dist

    from megatron_mopd.mcore.packed_index import packed_index

    assert dist.group.WORLD is not None
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    index = packed_index(cu, dist.group.WORLD)
    assert packed_index(cu, dist.group.WORLD) is index  # the other layers get the same maps
    masks = [group.mask_nsS for group in index.groups if group.mask_nsS is not None]
    pairs = sum(group.num_sequences * group.max_query * group.max_key for group in index.groups)
    return pairs, max(x.numel() for x in (index.query_slot_T, index.key_slot_A, *masks))


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("lengths", [(40,) * 64, (2000, *(36,) * 50, *(700,) * 2, *(80,) * 20)])
def test_the_work_of_a_pack_is_the_sum_of_squares_of_its_lengths(cp: int, lengths: tuple[int, ...], ranks: Pools):
    squares = sum(n * n for n in lengths)
    for pairs, largest in ranks(cp)(work, lengths):
        assert pairs * cp <= 4 * squares
        assert largest <= max(4 * squares // cp, sum(lengths))


def rope_difference(lengths: tuple[int, ...], mla: bool) -> tuple[float, float]:
    """Of value and gradient, between the one-step packed RoPE and upstream's formula on each sequence."""
    import torch.distributed as dist

    from megatron_mopd.mcore.packed_index import apply_packed_rope

    # isort: split
    from megatron.core.models.common.embeddings.rope_utils import (
        _apply_rotary_pos_emb_bshd,
        _get_thd_freqs_on_this_cp_rank,
    )

    group: Any = dist.group.WORLD
    cp, rank = group.size(), group.rank()
    t = torch.randn(sum(lengths) // cp, 3, 24 if mla else 16, requires_grad=True)
    angles = torch.randn(max(lengths), 1, 1, 8)
    freqs = torch.cat([angles, angles], dim=-1)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    parts = t.split([n // cp for n in lengths])
    want = torch.cat(
        [
            _apply_rotary_pos_emb_bshd(
                x[:, None], _get_thd_freqs_on_this_cp_rank(rank, cp, x, freqs), False, mla, 1.25
            ).squeeze(1)
            for x in parts
        ]
    )
    got = apply_packed_rope(t, cu, freqs, False, mla, 1.25, group)
    grad = torch.randn_like(want)
    (want_grad,), (got_grad,) = (torch.autograd.grad(x, t, grad) for x in (want, got))
    return (got - want).abs().max().item(), (got_grad - want_grad).abs().max().item()


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("mla", [False, True])
def test_packed_rope_equals_upstreams(cp: int, mla: bool, ranks: Pools):
    for value, gradient in ranks(cp)(rope_difference, (4, 16, 8, 12), mla):
        assert value < 2e-6
        assert gradient < 2e-6


def rms_norm_results(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    from megatron_mopd.mcore.local_layers import LocalRMSNorm

    config: Any = SimpleNamespace(
        normalization="RMSNorm",
        layernorm_zero_centered_gamma=False,
        params_dtype=x.dtype,
        sequence_parallel=True,
    )
    norm = LocalRMSNorm(config, x.shape[-1], eps=1e-6)
    assert norm.weight.sequence_parallel  # pyright: ignore
    norm.weight.data.copy_(weight)
    output = norm(x.requires_grad_())
    return [output.detach(), *torch.autograd.grad(output, [x, norm.weight], grad)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_rms_norm_equals_float64(dtype: torch.dtype, tolerance: float, ranks: Pools):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(7, 3, 32, generator=generator).to(dtype)
    weight = (torch.rand(32, generator=generator) + 0.5).to(dtype)
    grad = torch.randn(7, 3, 32, generator=generator).to(dtype)
    (got,) = ranks(1)(rms_norm_results, x, weight, grad)
    inputs = [t.double().requires_grad_() for t in (x, weight)]
    output = F.rms_norm(inputs[0], (32,), inputs[1], eps=1e-6)
    want = [output.detach(), *torch.autograd.grad(output, inputs, grad.double())]
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b).abs().max() <= tolerance * b.abs().max()
