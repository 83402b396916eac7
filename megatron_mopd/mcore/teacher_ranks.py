"""The Megatron teacher service on its ranks: log-probs of response tokens by a forward pass of one of several teachers.

Layout and precision come from `service.megatron`, which may differ from the student's. Teachers choose their experts
themselves (no router replay), and never change: there is no optimizer, no gradient and no training mode here.

Promises (tests/distributed/test_teacher_ranks.py): one float32 log-prob per response token, equal to transformers to
1e-5 in float32, at the sampling temperature over exactly the vocabulary (law 12), at every layout; a score does not
depend on what was scored before or beside it; no byte of any weights changes (law 11).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mopd.batch import Batch
from megatron_mopd.config import Config
from megatron_mopd.errors import UserError
from megatron_mopd.hf_folder import read_hf_config
from megatron_mopd.mcore import device
from megatron_mopd.mcore.families import family_of
from megatron_mopd.mcore.forward import (
    collect_hidden,
    collect_logprobs,
    keep_logprobs,
    keep_scores,
    response_tokens,
    run_schedule,
    score_responses,
)
from megatron_mopd.mcore.gpu_options import check_teachers_options
from megatron_mopd.mcore.head import LogprobHead
from megatron_mopd.mcore.layout import Layout
from megatron_mopd.mcore.microbatch import DeviceMicroBatch, micro_batches
from megatron_mopd.mcore.model import build_model
from megatron_mopd.mcore.precision import uses_recipes
from megatron_mopd.mcore.teacher_weights import TeacherWeights, has_quantized_experts
from megatron_mopd.scores import Scores, is_finite
from megatron_mopd.service.arguments import common_config
from megatron_mopd.token_rows import TokenRows
from megatron_mopd.types import Cell

# isort: split
from megatron.core.fp8_utils import prepare_model_for_fp8_inference
from megatron.core.transformer.module import Float16Module

_CELL = Cell("", "")  # a batch has cells; a teacher's rows are of no particular one


class TeacherRanks:
    """All teachers whose backend is megatron, on this rank. Needs groups of the layout `service_layout(config)`.

    Raises UserError for teachers that cannot share a model, and for bad files or options.
    """

    def __init__(self, config: Config) -> None:
        table, teachers = config.service.megatron, config.teachers.on("megatron")
        hf_config = common_config(teachers)
        self.vocab_size = family_of(hf_config).architecture(hf_config).vocab_size
        self._max_tokens = config.service.micro_batch_tokens
        with _of_the_service():
            check_teachers_options(table)
            self.layout = Layout.from_table(table)
            quantized = uses_recipes(table) and any(map(has_quantized_experts, teachers))
            self.models = build_model(table, hf_config, quantized)
        if self.models[-1].post_process:
            LogprobHead.install(self.models[-1], self.vocab_size, config.rollout.temperature)
        for model in self.models:
            model.requires_grad_(False).eval()
            if model.config.fp8:
                prepare_model_for_fp8_inference(model)  # its products want multiples of 16 tokens
        of_16_bits = self.models[0].config.bf16
        self._dtype = torch.bfloat16 if of_16_bits else torch.float32
        self.chunks = [Float16Module(m.config, m).eval() if of_16_bits else m for m in self.models]
        limits = config.service.resident_teachers, config.service.offloaded_teachers
        self.weights = TeacherWeights(self.models, teachers, *limits)
        self.weights.load_all()

    def score(self, teacher: str, rows: TokenRows) -> Scores | None:
        """Float32 log-probs [R] of the response tokens of all rows, on rank 0; None on the others. Collective, same
        arguments on all.

        Raises UserError for rows that no teacher could score (on all ranks), for files that can not be read again (on
        all), and for log-probs that are not finite (on rank 0).
        """
        return self._score(teacher, rows, with_hidden=False)

    def score_hidden(self, teacher: str, rows: TokenRows) -> Scores | None:
        """As `score`, with the hidden states [R, D] that the head reads at each response token, unrounded."""
        return self._score(teacher, rows, with_hidden=True)

    @torch.no_grad()
    def _score(self, teacher: str, rows: TokenRows, with_hidden: bool) -> Scores | None:
        self._refuse_bad_tokens(teacher, rows)
        batch = batch_of(rows.with_response())
        hidden = np.zeros((0, self.models[0].config.hidden_size), np.float32)
        logprobs = np.zeros(0, np.float32)
        if len(batch):
            self.weights.switch_to(teacher)
            mine = self.pack(batch)
            kept = self.forward(mine, with_hidden)
            if with_hidden:
                hidden = self._hidden(mine, [part for _, part in kept], batch)
                kept = [part for part, _ in kept]
            logprobs_N = collect_logprobs(mine, kept, len(batch.token_ids), response_tokens)
            logprobs = logprobs_N.cpu().numpy()[batch.loss_mask]
        if dist.get_rank():
            return None
        if not (finite := np.isfinite(logprobs)).all():
            row = rows.row_of_response_token(int(finite.argmin()))
            raise UserError(f"teacher {teacher} gives a log-prob that is not finite for row {row} of {len(rows)}")
        if with_hidden and not is_finite(hidden):
            raise UserError(f"teacher {teacher} gives a hidden state that is not finite")
        return Scores(logprobs, hidden if with_hidden else None)

    def _hidden(self, mine: Sequence[DeviceMicroBatch], kept: Sequence[Tensor], batch: Batch) -> np.ndarray:
        """[M, D] of the M response tokens, on the host of every rank."""
        index_N = torch.from_numpy(np.cumsum(batch.loss_mask) - 1).to(device.DEVICE)
        shape = (int(batch.loss_mask.sum()), self.models[0].config.hidden_size)
        hidden_MD = torch.zeros(shape, dtype=self._dtype, device=device.DEVICE)
        collect_hidden(mine, kept, index_N, hidden_MD)
        bits = torch.uint16 if self._dtype == torch.bfloat16 else self._dtype
        return hidden_MD.cpu().view(bits).numpy()

    def pack(self, batch: Batch) -> list[DeviceMicroBatch]:
        """The micro-batches of this rank."""
        weights = np.zeros(len(batch), np.float32)
        return micro_batches(batch, weights, self.layout, self._max_tokens, self.vocab_size)[0]

    @torch.no_grad()
    def forward(self, mine: Sequence[DeviceMicroBatch], with_hidden: bool = False) -> list[Any]:
        """The log-probs of the responses of each micro-batch (with their hidden states), on ranks of the last stage.
        Collective."""
        keep = partial(keep_scores, self._dtype) if with_hidden else keep_logprobs
        ask = partial(score_responses, with_hidden=with_hidden)
        return run_schedule(self.chunks, mine, keep, forward_only=True, ask=ask)

    def _refuse_bad_tokens(self, teacher: str, rows: TokenRows) -> None:
        bare = (rows.prompt_lengths == 0) & (rows.response_lengths > 0)
        if bare.any():
            row = int(bare.argmax())
            raise UserError(f"teacher {teacher}, row {row}: an empty prompt leaves the first token without context")
        bad = (rows.token_ids < 0) | (rows.token_ids >= self.vocab_size)
        if bad.any():
            raise UserError(f"teacher {teacher} has {self.vocab_size} tokens, and none of id {rows.token_ids[bad][0]}")


def service_layout(config: Config) -> Layout:
    """The layout of `service.megatron`. UserError where it does not fit the teachers or the processes."""
    hf_config = common_config(config.teachers.on("megatron"))
    with _of_the_service():
        layout = Layout.from_table(config.service.megatron)
        layout.check(hf_config, dist.get_world_size())
    return layout


def max_tokens(folder: Path) -> int:
    """Of a trajectory, prompt included, that a teacher was made for."""
    hf_config = read_hf_config(folder)
    return family_of(hf_config).architecture(hf_config).max_sequence_length


@contextmanager
def _of_the_service():
    """Errors of the table say `megatron`, which is the student's."""
    try:
        yield
    except UserError as error:
        raise UserError(f"in service.megatron: {error}") from None


def batch_of(rows: TokenRows) -> Batch:
    """The mask is on the tokens of responses."""
    total, zeros = len(rows.token_ids), np.zeros(len(rows.token_ids), np.float32)
    return Batch(
        offsets=np.concatenate([[0], rows.ends]).astype(np.int64),
        cell=np.zeros(len(rows), np.int32),
        token_ids=rows.token_ids,
        loss_mask=rows.is_response,
        rollout_logprobs=zeros,
        teacher_logprobs=zeros,
        weight_version=np.zeros(total, np.int32),
        cells=(_CELL,),
    )
