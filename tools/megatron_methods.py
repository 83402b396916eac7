"""Megatron-Core's own cross-entropies, from the real package, for tools/bench_head.py; see head_methods.py."""

from __future__ import annotations

import torch.distributed as dist
from head_methods import Answer, Problem, by_autograd

from megatron_mopd.mcore import device, parallel  # noqa: F401
from megatron_mopd.mcore.layout import Layout

# isort: split
from megatron.core import parallel_state
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy


def initialize() -> None:
    """Megatron's groups: all ranks are tensor-parallel."""
    parallel.initialize_parallel(Layout.from_table({"tensor_model_parallel_size": dist.get_world_size()}), seed=0)


def mcore(p: Problem) -> Answer:
    """vocab_parallel_cross_entropy on logits in the model's dtype."""
    return by_autograd(p, lambda logits_T1v: -vocab_parallel_cross_entropy(logits_T1v, p.target_T[:, None])[:, 0])


def mcore_fused(p: Problem) -> Answer:
    """fused_vocab_parallel_cross_entropy (not compiled on a CPU)."""
    group = parallel_state.get_tensor_model_parallel_group()
    return by_autograd(
        p, lambda logits_T1v: -fused_vocab_parallel_cross_entropy(logits_T1v, p.target_T[:, None], group)[:, 0]
    )


METHODS = {f.__name__: f for f in (mcore, mcore_fused)}
