"""The log-prob head under Megatron's DDP: what is in `main_grad` is what autograd would have brought there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Pools
from torch import Tensor

T, D, V = 24, 16, 90
SCALE = 7.0
"""What the schedule multiplies the loss with."""


def draw(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their targets, coefficients: those of a micro-batch."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(V, (T,), generator=g), torch.randint(V, (T,), generator=g), torch.randn(T, generator=g)


def weights(num_rows: int) -> tuple[Tensor, Tensor]:
    """Of an embedding and of an output layer; the rows of a padded vocabulary are not zero."""
    g = torch.Generator().manual_seed(99)
    embedding_PD, output_PD = torch.randn(2, num_rows, D, generator=g)
    return embedding_PD, output_PD


def model_of(is_tied: bool, dtype: torch.dtype) -> tuple[Any, Any]:
    """An embedding and an output layer, and nothing between; and its TransformerConfig."""
    from megatron_mopd.mcore import device  # noqa: F401
    from megatron_mopd.mcore.head import LogprobHead
    from megatron_mopd.mcore.layout import Layout
    from megatron_mopd.mcore.model import padded_vocab_size
    from megatron_mopd.mcore.parallel import initialize_parallel

    # isort: split
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer import MegatronModule, TransformerConfig

    initialize_parallel(Layout.from_table({}), seed=0)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=D,
        num_attention_heads=2,
        use_cpu_initialization=True,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,  # ranks' gradients are added
    )
    rows = padded_vocab_size(V, 1)

    class Model(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config)
            embedding_PD, output_PD = weights(rows)
            self.word_embeddings = torch.nn.Parameter(embedding_PD.to(dtype))
            self.output_layer: Any = ColumnParallelLinear(
                D,
                rows,
                config=config,
                init_method=torch.nn.init.zeros_,
                bias=False,
                skip_weight_param_allocation=is_tied,
                tp_group=parallel_state.get_tensor_model_parallel_group(),  # pyright: ignore[reportArgumentType]
            )
            if is_tied:
                self.word_embeddings.zero_out_wgrad = True  # pyright: ignore[reportAttributeAccessIssue]  (as GPTModel)
            else:
                self.output_layer.weight.data.copy_(output_PD)
            LogprobHead.install(self, V, 1.0)  # pyright: ignore[reportArgumentType]

        def forward(self, ids_T: Tensor) -> Tensor:
            hidden_T1D = torch.nn.functional.embedding(ids_T, self.word_embeddings)[:, None]
            return self.output_layer(hidden_T1D, weight=self.word_embeddings if is_tied else None)[0]

    return Model(), config


def gradients_in_ddp(is_tied: bool, overlap: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`main_grad` of the embedding and of the output layer after two micro-batches, reduced over the ranks."""
    model, config = model_of(is_tied, dtype)
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    ddp = DistributedDataParallel(
        config, DistributedDataParallelConfig(overlap_grad_reduce=overlap, grad_reduce_in_fp32=True), model
    )
    ddp.zero_grad_buffer()
    rank = torch.distributed.get_rank()
    for number, around in ((0, ddp.no_sync()), (1, torch.enable_grad())):
        ids_T, target_T, weight_T = draw(10 * rank + number)
        with around:
            with model.output_layer.learning(target_T, lambda _, index_c, all_T=weight_T: all_T[index_c]):
                output_T14 = ddp(ids_T)
            (output_T14[..., -1].sum() * SCALE).backward()
    ddp.finish_grad_sync()
    own = model.word_embeddings if is_tied else model.output_layer.weight
    return model.word_embeddings.main_grad.clone(), own.main_grad.clone()


def gradients_of_autograd(is_tied: bool, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    embedding_PD, output_PD = (x_PD.to(dtype).double().requires_grad_() for x_PD in weights(num_rows))
    used_PD = embedding_PD if is_tied else output_PD
    for rank in range(2):
        for number in range(2):
            ids_T, target_T, weight_T = draw(10 * rank + number)
            logits_TV = embedding_PD[ids_T] @ used_PD[:V].t()
            logprobs_T = logits_TV.log_softmax(-1).gather(1, target_T[:, None])[:, 0]
            (SCALE * (weight_T.double() * logprobs_T).sum()).backward()
    assert embedding_PD.grad is not None
    assert used_PD.grad is not None
    return embedding_PD.grad, used_PD.grad


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("overlap", "dtype", "tolerance"),
    [(False, torch.float32, 1e-6), (True, torch.float32, 1e-6), (True, torch.bfloat16, 1e-2)],
)
def test_ddp_finds_the_gradient_of_autograd(
    is_tied: bool, overlap: bool, dtype: torch.dtype, tolerance: float, ranks: Pools
) -> None:
    """Added up over micro-batches and ranks; its hook fires, also for a weight that the embedding uses too."""
    for got in ranks(2)(gradients_in_ddp, is_tied, overlap, dtype):
        want = gradients_of_autograd(is_tied, len(got[0]), dtype)
        for got_PD, want_PD in zip(got, want, strict=True):
            assert got_PD.dtype == torch.float32
            assert (got_PD.double() - want_PD).norm() < tolerance * want_PD.norm()


def with_a_frozen_layer(is_frozen: bool) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the embedding and of the output layer."""
    model, _ = model_of(is_tied=False, dtype=torch.float32)
    model.output_layer.weight.requires_grad_(not is_frozen)
    ids_T, target_T, weight_T = draw(0)
    with model.output_layer.learning(target_T, lambda _, index_c: weight_T[index_c]):
        output_T14 = model(ids_T)
    output_T14[..., -1].sum().backward()
    return model.word_embeddings.grad, model.output_layer.weight.grad


def test_a_frozen_layer_gets_no_gradient_and_changes_none(ranks: Pools) -> None:
    (trained,), (frozen,) = (ranks(1)(with_a_frozen_layer, is_frozen) for is_frozen in (False, True))
    assert trained[1] is not None
    assert frozen[1] is None
    assert frozen[0].any()
    assert torch.equal(frozen[0], trained[0])
