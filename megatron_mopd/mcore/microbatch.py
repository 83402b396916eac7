"""A batch to the packed micro-batches of this rank, as tensors on its device.

Shape suffixes: T packed tokens of a micro-batch on this context-parallel rank, S those in the mask.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_mopd.batch import Batch
from megatron_mopd.errors import UserError
from megatron_mopd.mcore import device
from megatron_mopd.mcore.layout import Layout
from megatron_mopd.mcore.packing import MicroBatch, pack, padded_length, plan
from megatron_mopd.objectives.objective import TokenColumns
from megatron_mopd.types import Cell

# isort: split
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams


class Rows(Protocol):
    """A batch in memory (batch.Batch) or on disk (store.StoredBatch)."""

    @property
    def cells(self) -> tuple[Cell, ...]: ...
    @property
    def cell(self) -> np.ndarray: ...
    @property
    def lengths(self) -> np.ndarray: ...
    @property
    def loss_tokens(self) -> np.ndarray: ...
    @property
    def advantage_sums(self) -> np.ndarray: ...
    @property
    def outcome_advantage(self) -> np.ndarray | None: ...
    def __len__(self) -> int: ...
    def select(self, rows: Sequence[int], optional: Collection[str], /) -> Batch: ...


class DeviceMicroBatch(NamedTuple):
    """A packed micro-batch as the model and the objective take it."""

    input_ids_T: Tensor
    position_ids_T: Tensor
    target_T: Tensor
    cell_T: Tensor
    token_T: Tensor
    """Index of the target among all tokens of the batch; -1 on padding."""
    bucket_T: Tensor
    """By position among its row's trained tokens, 0 to NUM_BUCKETS - 1."""
    weight_version_T: Tensor
    """Of the weights that sampled the target."""
    columns: TokenColumns
    sequences: PackedSeqParams
    routed_experts: Tensor | None
    """[T, L, K] int16 of the inputs, on the host: a chunk takes its layers of it when their turn comes. None: no
    replay."""
    teacher_hidden_SD: Tensor | None
    """Of the targets in the mask, on the host, bfloat16 or float32. None: the objective needs none."""


def micro_batches(
    batch: Rows, weights: np.ndarray, layout: Layout, max_tokens: int, vocab_size: int, optional: Collection[str] = ()
) -> tuple[list[DeviceMicroBatch], int]:
    """The micro-batches of this rank, equally many on each, and the packed tokens of all ranks together.

    `weights` [n] is the weight of each row's tokens; `optional` are the optional columns of the batch to read.
    Raises UserError for a token id that the model does not have.
    """
    # Interleaved pipelines take micro-batches in groups of the pipeline's size.
    multiple = layout.pp if layout.vpp is not None else 1
    dp = parallel_state.get_data_parallel_world_size()
    ranks = plan(batch.lengths, dp, max_tokens, multiple)
    num_packed = sum(padded_length(batch.lengths[rows], layout.tp, layout.cp) for rank in ranks for rows in rank)
    starts = np.cumsum(batch.lengths) - batch.lengths
    mine = []
    for rows in ranks[parallel_state.get_data_parallel_rank()]:
        part = batch.select(rows, optional)
        _check_vocabulary(part, vocab_size)
        micro = pack(part, weights[rows], layout.tp, layout.cp, parallel_state.get_context_parallel_rank())
        origin = np.repeat(starts[rows] - part.offsets[:-1], part.lengths) + np.arange(len(part.token_ids))
        mine.append(_to_device(micro, origin))
    return mine, num_packed


def _check_vocabulary(batch: Batch, vocab_size: int) -> None:
    bad = (batch.token_ids < 0) | (batch.token_ids >= vocab_size)
    if bad.any():
        raise UserError(
            f"the batch holds token id {batch.token_ids[bad][0]}, and the student's vocabulary has {vocab_size}; "
            "use the tokenizer of the student's checkpoint"
        )


def _to_device(micro: MicroBatch, origin: np.ndarray) -> DeviceMicroBatch:
    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device.DEVICE, non_blocking=True)

    bounds = tensor(micro.cu_seqlens)
    token = micro.token.copy()
    token[token >= 0] = origin[token[token >= 0]]
    return DeviceMicroBatch(
        input_ids_T=tensor(micro.input_ids),
        position_ids_T=tensor(micro.position_ids),
        target_T=tensor(micro.target_ids),
        cell_T=tensor(micro.cell),
        token_T=tensor(token),
        bucket_T=tensor(micro.bucket),
        weight_version_T=tensor(micro.weight_version),
        columns=TokenColumns(
            loss_mask_T=tensor(micro.loss_mask),
            weight_T=tensor(micro.weight),
            rollout_logprobs_T=tensor(micro.rollout_logprobs),
            teacher_logprobs_T=tensor(micro.teacher_logprobs),
            outcome_advantage_T=tensor(micro.outcome_advantage),
        ),
        sequences=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=micro.max_seqlen,
            max_seqlen_kv=micro.max_seqlen,
        ),
        routed_experts=None if micro.routed_experts is None else torch.from_numpy(micro.routed_experts),
        teacher_hidden_SD=None if micro.teacher_hidden is None else from_bits(micro.teacher_hidden),
    )


def from_bits(hidden_SD: np.ndarray) -> Tensor:
    """See scores.py."""
    tensor = torch.from_numpy(hidden_SD)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor
