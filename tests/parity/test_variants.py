"""Parts of Megatron that the `megatron:` table reaches: outputs and gradients do not depend on the layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Pools
from tiny import LAYOUTS, VOCAB_SIZE, write_checkpoint

MLA = {
    "multi_latent_attention": True,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
}
DEEPSEEK_ROUTER = {
    "moe_router_score_function": "sigmoid",
    "moe_router_pre_softmax": False,
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 32,
    "moe_router_topk_scaling_factor": 2.5,
}
VARIANTS = {
    "MLA": MLA,
    "sigmoid router, expert bias, shared expert": DEEPSEEK_ROUTER,
    "both": {**MLA, **DEEPSEEK_ROUTER},
    "full recompute": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "selective recompute": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]},
    "auxiliary loss": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01},
}
LENGTHS = (8, 16, 4, 12)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_moe")
    write_checkpoint(folder)
    return folder


def build(megatron: dict[str, Any], folder: Path):
    from megatron_mopd.hf_folder import read_hf_config
    from megatron_mopd.mcore.layout import Layout
    from megatron_mopd.mcore.model import build_model
    from megatron_mopd.mcore.parallel import initialize_parallel

    initialize_parallel(Layout.from_table(megatron), seed=3)
    (model,) = build_model(megatron, read_hf_config(folder))
    return model


def save(model, folder: Path) -> None:
    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    dist_checkpointing.save(model.sharded_state_dict(prefix="model."), str(folder))


def load(model, folder: Path) -> None:
    from megatron.core import dist_checkpointing

    loaded: Any = dist_checkpointing.load(model.sharded_state_dict(prefix="model."), str(folder))
    model.load_state_dict({name.removeprefix("model."): value for name, value in loaded.items()}, strict=False)


def save_random_weights(megatron: dict[str, Any], checkpoint: Path, folder: Path) -> None:
    model = build(megatron, checkpoint)
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if "bias" in name or "norm" in name:
            parameter.data.add_(torch.rand_like(parameter) * 0.3)  # as they are born they would hide a fault
    save(model, folder)


def losses_and_gradients(megatron: dict[str, Any], checkpoint: Path, weights: Path, gradients: Path) -> torch.Tensor:
    """Cross-entropy per token on the packed sequences; gradients are saved as if they were weights."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.packed_seq_params import PackedSeqParams

    model = build(megatron, checkpoint)
    load(model, weights)
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(VOCAB_SIZE, (1, sum(LENGTHS) + 1), generator=generator)
    cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=max(LENGTHS), max_seqlen_kv=max(LENGTHS)
    )
    cp, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    here = torch.arange(sum(LENGTHS))
    if cp > 1:
        chunks = [x.chunk(2 * cp) for x in here.split(LENGTHS)]
        here = torch.cat([torch.cat([c[rank], c[2 * cp - 1 - rank]]) for c in chunks])
    losses = wrapped(ids[:, here], None, None, labels=ids[:, here + 1], packed_seq_params=packed)[0]
    losses.sum().backward()
    finalize_model_grads([wrapped], None)
    whole = torch.zeros(sum(LENGTHS)).index_copy(0, here, losses.detach())
    dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
    for parameter in model.parameters():
        parameter.data = parameter.main_grad.float()  # pyright: ignore
    save(model, gradients)
    return whole


def gradient_difference(megatron: dict[str, Any], checkpoint: Path, one: Path, other: Path) -> dict[str, float]:
    """Largest difference of each parameter's gradient, relative to the largest gradient of that parameter."""
    model = build(megatron, checkpoint)
    found = []
    for folder in (one, other):
        load(model, folder)
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return {n: ((found[1][n] - g).abs().max() / (g.abs().max() + 1e-12)).item() for n, g in found[0].items()}


def compare(variant: dict, other: dict, layout: str, ranks: Pools, checkpoint: Path, folder: Path) -> None:
    ranks(1)(save_random_weights, variant, checkpoint, folder / "weights")
    (want,) = ranks(1)(losses_and_gradients, variant, checkpoint, folder / "weights", folder / "one")
    size, megatron = LAYOUTS[layout]
    for got in ranks(size)(losses_and_gradients, {**other, **megatron}, checkpoint, folder / "weights", folder / "two"):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    (difference,) = ranks(1)(gradient_difference, variant, checkpoint, folder / "one", folder / "two")
    assert max(difference.values()) < 1e-4, sorted(difference.items(), key=lambda item: -item[1])[:5]


@pytest.mark.parametrize("layout", ["TP2xEP2", "CP2"])
@pytest.mark.parametrize("variant", ["MLA", "sigmoid router, expert bias, shared expert", "both"])
def test_variant_is_the_same_in_every_layout(variant: str, layout: str, ranks: Pools, checkpoint: Path, tmp_path: Path):
    compare(VARIANTS[variant], VARIANTS[variant], layout, ranks, checkpoint, tmp_path)


@pytest.mark.parametrize("variant", ["full recompute", "selective recompute"])
def test_recompute_changes_nothing(variant: str, ranks: Pools, checkpoint: Path, tmp_path: Path):
    compare({}, VARIANTS[variant], "TP2xEP2", ranks, checkpoint, tmp_path)


def test_an_auxiliary_loss_reaches_the_router(ranks: Pools, checkpoint: Path, tmp_path: Path):
    ranks(1)(save_random_weights, {}, checkpoint, tmp_path / "weights")
    for table, name in (({}, "without"), (VARIANTS["auxiliary loss"], "with")):
        ranks(1)(losses_and_gradients, table, checkpoint, tmp_path / "weights", tmp_path / name)
    (difference,) = ranks(1)(gradient_difference, {}, checkpoint, tmp_path / "without", tmp_path / "with")
    assert difference["decoder.layers.0.mlp.router.weight"] > 1e-5
    assert difference["output_layer.weight"] < 1e-5
