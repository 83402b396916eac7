"""Law 8: Megatron's logits are those of transformers, in every layout, packed and not."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Pools
from tiny import LAYOUTS, VOCAB_SIZE, write_checkpoint

LENGTHS = ((5, 16, 1, 13, 8), (24, 3, 7))
"""Sequences of two micro-batches, which differ in their number of tokens."""
MULTIPLE = 8
"""Sequences are padded to this in the pack, which fits every layout's TP and context parallelism."""
TOLERANCE = 1e-5


def sequences(lengths: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(VOCAB_SIZE, (n,), generator=generator) for n in lengths]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_moe")
    write_checkpoint(folder)
    return folder


def transformers_logits(folder: Path) -> list[list[torch.Tensor]]:
    from transformers import Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [[model(x[None]).logits[0] for x in sequences(lengths)] for lengths in LENGTHS]


@pytest.fixture(scope="module")
def want(checkpoint: Path) -> list[list[torch.Tensor]]:
    """[micro-batch][sequence] logits [L, V]."""
    return transformers_logits(checkpoint)


def zigzag(bounds: list[int], cp: int, cp_rank: int) -> torch.Tensor:
    """Places of the pack that a context-parallel rank holds."""
    places = []
    for start, end in pairwise(bounds):
        chunks = torch.arange(start, end).chunk(2 * cp)
        places += [chunks[cp_rank], chunks[2 * cp - 1 - cp_rank]] if cp > 1 else [torch.arange(start, end)]
    return torch.cat(places)


def packed_micro_batch(lengths: tuple[int, ...], cp: int, cp_rank: int) -> dict[str, Any]:
    from megatron.core.packed_seq_params import PackedSeqParams

    padded = [-(-n // MULTIPLE) * MULTIPLE for n in lengths]
    bounds = [sum(padded[:i]) for i in range(len(padded) + 1)]
    ids = torch.zeros(bounds[-1], dtype=torch.long)
    for start, x in zip(bounds, sequences(lengths), strict=False):
        ids[start : start + len(x)] = x
    here = zigzag(bounds, cp, cp_rank)
    cu = torch.tensor(bounds, dtype=torch.int32)
    longest = max(padded)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    return {"ids": ids[here][None], "place": here, "bounds": bounds, "packed_seq_params": packed}


def padded_micro_batch(lengths: tuple[int, ...], cp: int, cp_rank: int) -> dict[str, Any]:
    """Right padding instead of packing: [b, s]."""
    longest = -(-max(lengths) // MULTIPLE) * MULTIPLE
    ids = torch.nn.utils.rnn.pad_sequence([*sequences(lengths), torch.zeros(longest)], batch_first=True)[:-1].long()
    here = zigzag([0, longest], cp, cp_rank)
    return {"ids": ids[:, here], "place": here, "packed_seq_params": None}


def megatron_logits(megatron: dict[str, Any], folder: Path, packed: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per micro-batch: this rank's places, and logits [b, here, V] there. Empty but on the last pipeline stage."""
    from megatron_mopd.hf_folder import read_hf_config
    from megatron_mopd.mcore.layout import Layout
    from megatron_mopd.mcore.model import build_model
    from megatron_mopd.mcore.parallel import initialize_parallel
    from megatron_mopd.mcore.weights import load_hf

    # isort: split
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    layout = Layout.from_table(megatron)
    initialize_parallel(layout, seed=1)
    models = build_model(megatron, read_hf_config(folder))
    load_hf(models, folder)
    make = packed_micro_batch if packed else padded_micro_batch
    data = [make(lengths, layout.cp, parallel_state.get_context_parallel_rank()) for lengths in LENGTHS]

    def forward_step(iterator, model):
        batch = next(iterator)
        logits = model(batch["ids"], None, None, packed_seq_params=batch["packed_seq_params"])
        return logits, lambda x, non_loss_data: gather_from_tensor_model_parallel_region(x)

    first = data[0]["ids"]
    with torch.no_grad():
        logits = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(data) for _ in models] if len(models) > 1 else iter(data),
            model=[*models] if len(models) > 1 else models[0],
            num_microbatches=len(data),
            seq_length=first.shape[1],
            micro_batch_size=first.shape[0],
            forward_only=True,
            collect_non_loss_data=True,
        )
    return [(d["place"], x[..., :VOCAB_SIZE]) for d, x in zip(data, logits, strict=False)]


def assemble(results: list[list[tuple[torch.Tensor, torch.Tensor]]], micro_batch: int, packed: bool):
    """[sequence] logits of the whole micro-batch, from the parts of all ranks."""
    whole: dict[int, torch.Tensor] = {}
    for of_rank in results:
        if of_rank:
            place, logits = of_rank[micro_batch]
            for i, p in enumerate(place.tolist()):
                whole[p] = logits[:, i]
    lengths = LENGTHS[micro_batch]
    joined = torch.stack([whole[p] for p in range(len(whole))], dim=1)  # [b, T, V]
    if not packed:
        return [joined[row, :n] for row, n in enumerate(lengths)]
    starts = [sum(-(-n // MULTIPLE) * MULTIPLE for n in lengths[:i]) for i in range(len(lengths))]
    return [joined[0, start : start + n] for start, n in zip(starts, lengths, strict=True)]


def difference(results, want, packed: bool) -> float:
    got = [assemble(results, i, packed) for i in range(len(LENGTHS))]
    return max(
        (g - w).abs().max().item()
        for got_rows, want_rows in zip(got, want, strict=True)
        for g, w in zip(got_rows, want_rows, strict=True)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_equal_transformers(layout: str, ranks: Pools, checkpoint: Path, want):
    size, megatron = LAYOUTS[layout]
    results = ranks(size)(megatron_logits, megatron, checkpoint, True)
    assert difference(results, want, packed=True) < TOLERANCE


@pytest.mark.parametrize("layout", ["single", "TP2+SP", "CP2"])
def test_logits_without_packing_equal_transformers(layout: str, ranks: Pools, checkpoint: Path, want):
    size, megatron = LAYOUTS[layout]
    results = ranks(size)(megatron_logits, megatron, checkpoint, False)
    assert difference(results, want, packed=False) < TOLERANCE


def test_router_that_does_not_renormalise(ranks: Pools, tmp_path: Path):
    write_checkpoint(tmp_path, norm_topk_prob=False)
    results = ranks(1)(megatron_logits, {}, tmp_path, True)
    assert difference(results, transformers_logits(tmp_path), packed=True) < TOLERANCE


def logits_with_plain_qkv(megatron: dict[str, Any], folder: Path):
    from megatron_mopd.mcore import sharding

    right = sharding.SHARDINGS["qkv"]
    plain = sharding.Sharding(
        lambda full, geometry, rank, size: torch.cat(list(full)).chunk(size)[rank], right.unshard, right.shapes
    )
    sharding.SHARDINGS["qkv"] = plain
    try:
        return megatron_logits(megatron, folder, True)
    finally:
        sharding.SHARDINGS["qkv"] = right


def test_a_plain_cat_of_qkv_would_be_seen(ranks: Pools, checkpoint: Path, want):
    results = ranks(1)(logits_with_plain_qkv, {}, checkpoint)
    assert difference(results, want, packed=True) > 1.0
