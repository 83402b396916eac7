"""Megatron's schedule over packed micro-batches, and a forward pass that only scores: of the learner and of teachers.

A scoring pass needs no optimizer, no gradient buffers and no objective: bare GPTModels do, wrapped in Megatron's
Float16Module where they compute in bfloat16. Promises (tests/distributed/test_layouts.py, test_teacher_ranks.py): the
log-prob of a token does not depend on the layout, on what shares its micro-batch, or on which of them are asked for.

Shape suffixes: T packed tokens of a micro-batch on this context-parallel rank, S those of them that are scored, N
tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_mopd.mcore import device
from megatron_mopd.mcore.collectives import from_last_stage, sum_over_data
from megatron_mopd.mcore.head import LogprobHead
from megatron_mopd.mcore.microbatch import DeviceMicroBatch

# isort: split
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model

# From a micro-batch and the head's output [1, S, columns] to what Megatron's schedule takes: loss, token count, what to
# keep.
LossFunction = Callable[[DeviceMicroBatch, Tensor], tuple[Tensor, Tensor, Any]]
# The packed tokens of a micro-batch that the head scores, [S] int64; None: all, S = T.
Positions = Callable[[DeviceMicroBatch], Tensor | None]
# What the head is to answer for a micro-batch, while the model runs.
Ask = Callable[[LogprobHead, DeviceMicroBatch], AbstractContextManager[None]]
Prepare = Callable[[GPTModel, DeviceMicroBatch], None]


def all_tokens(micro: DeviceMicroBatch) -> None:
    """Position function: the head scores everything, padding included."""


def response_tokens(micro: DeviceMicroBatch) -> Tensor:
    """Position function: the head scores the tokens in the mask alone, which saves its work on long prompts."""
    return micro.columns.loss_mask_T.nonzero()[:, 0]


def score_all(head: LogprobHead, micro: DeviceMicroBatch) -> AbstractContextManager[None]:
    return head.scoring(micro.target_T)


def score_responses(
    head: LogprobHead, micro: DeviceMicroBatch, with_hidden: bool = False
) -> AbstractContextManager[None]:
    return head.scoring(micro.target_T, response_tokens(micro), with_hidden)


def run_schedule(
    chunks: Sequence[torch.nn.Module],
    mine: Sequence[DeviceMicroBatch],
    loss: LossFunction,
    *,
    forward_only: bool,
    ask: Ask = score_all,
    prepare: Prepare | None = None,
) -> list[Any]:
    """Megatron's schedule over this rank's micro-batches; what `loss` keeps of each, on ranks of the last stage.

    `chunks` are the rank's virtual stages; `prepare` is called before each forward of one. Collective.
    """
    return get_forward_backward_func()(
        forward_step_func=partial(_forward, loss, ask, prepare),
        data_iterator=[iter(mine) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(mine),
        seq_length=1,  # not read: shapes travel with the tensors
        micro_batch_size=1,
        forward_only=forward_only,
    )


def _forward(
    loss: LossFunction, ask: Ask, prepare: Prepare | None, mine: Iterator[DeviceMicroBatch], chunk: Any
) -> tuple[Tensor, partial]:
    micro = next(mine)
    model: Any = unwrap_model(chunk)
    if prepare is not None:
        prepare(model, micro)
    with ask(model.output_layer, micro) if model.post_process else nullcontext():
        output = chunk(
            input_ids=micro.input_ids_T[None],
            position_ids=micro.position_ids_T[None],
            attention_mask=None,
            packed_seq_params=micro.sequences,
        )
    return output, partial(loss, micro)


def keep_logprobs(micro: DeviceMicroBatch, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """LossFunction of a scoring pass: keeps the log-probs [S]."""
    logprobs_S = output[0, :, 0]
    return logprobs_S.sum(), torch.tensor(len(logprobs_S), dtype=torch.int), logprobs_S


def keep_scores(
    dtype: torch.dtype, micro: DeviceMicroBatch, output: Tensor
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """LossFunction of a scoring pass with hidden states: keeps the log-probs [S], and those [S, D] in their dtype."""
    loss, num_tokens, logprobs_S = keep_logprobs(micro, output)
    return loss, num_tokens, (logprobs_S, output[0, :, 3:].to(dtype))


def collect_logprobs(
    mine: Sequence[DeviceMicroBatch],
    kept: Sequence[Tensor],
    num_tokens: int,
    positions: Positions = all_tokens,
) -> Tensor:
    """[N] float32 on every rank: the log-prob of each token of the batch that a rank has scored, 0 for the others.

    `kept` is what `run_schedule` returned for `keep_logprobs` and the same positions. Collective.
    """
    logprobs_N = torch.zeros(num_tokens, device=device.DEVICE)
    for micro, logprobs_S in zip(mine if kept else [], kept, strict=True):
        at_S = positions(micro)
        token_S = micro.token_T if at_S is None else micro.token_T[at_S]
        real_S = token_S >= 0
        logprobs_N[token_S[real_S]] = logprobs_S[real_S]
    sum_over_data(logprobs_N)  # each token has one owner
    from_last_stage(logprobs_N)
    return logprobs_N


def collect_hidden(mine: Sequence[DeviceMicroBatch], kept: Sequence[Tensor], index_N: Tensor, out_MD: Tensor) -> None:
    """Fill `out_MD`, zeros on every rank, with the hidden states of the tokens in the mask: of token n of the batch at
    row index_N[n]. `kept` are those of `run_schedule` for the responses. Collective."""
    for micro, hidden_SD in zip(mine if kept else [], kept, strict=True):
        out_MD[index_N[micro.token_T[response_tokens(micro)]]] = hidden_SD
    sum_over_data(out_MD)  # each token has one owner, and adding zeros changes no bit
    from_last_stage(out_MD)
