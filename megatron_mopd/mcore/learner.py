"""5 UPDATE: the student on Megatron-Core, updated by one batch at a time with whatever objective the config names.

Promises (tests/distributed/test_layouts.py): the loss and the gradient of a batch do not depend on the layout (TP, SP,
EP, ETP, PP, VPP, CP, DP), on how rows are split into micro-batches, or on their order. What makes it so:
- the coefficient of a token holds the normaliser of the whole batch, so contributions are added, over micro-batches and
  ranks;
- Megatron's per-token mode sums gradients and divides by a count that it all-reduces. We report packed tokens and scale
  the loss by their total, which cancels; load-balancing losses, scaled by the same tokens (balancing.py), stay means.

Micro-batches differ in length; with pipeline parallelism the stages tell each other the shapes (variable_seq_lengths).

Shape suffixes: T packed tokens of a micro-batch on this context-parallel rank, N tokens of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_mopd.config import Config
from megatron_mopd.errors import UserError
from megatron_mopd.hf_folder import read_hf_config
from megatron_mopd.mcore import device, weights
from megatron_mopd.mcore.audit import audit_export
from megatron_mopd.mcore.balancing import BalancedRouter
from megatron_mopd.mcore.families import family_of
from megatron_mopd.mcore.forward import Ask, LossFunction, collect_logprobs, keep_logprobs, run_schedule, score_all
from megatron_mopd.mcore.head import LogprobHead
from megatron_mopd.mcore.layout import Layout
from megatron_mopd.mcore.metrics import cell_metrics, micro_batch_sums, reduce_sums, total_loss
from megatron_mopd.mcore.microbatch import DeviceMicroBatch, Rows, micro_batches
from megatron_mopd.mcore.model import build_model
from megatron_mopd.mcore.optimizer import build_optimizer, wrap
from megatron_mopd.mcore.options import check_optimizer_options, check_router_replay, split_megatron_table
from megatron_mopd.mcore.quantized_experts import QuantizedExperts
from megatron_mopd.mcore.router_replay import Agreement, Observer, RouterReplay
from megatron_mopd.mcore.stream import HfStream
from megatron_mopd.mcore.teacher_heads import TeacherHeads
from megatron_mopd.objectives.balance import batch_weights
from megatron_mopd.objectives.build import build_objective
from megatron_mopd.objectives.distribution import TargetDivergence
from megatron_mopd.objectives.logprob_head import TargetLogprobs
from megatron_mopd.objectives.objective import TokenColumns
from megatron_mopd.quantization.policy import check_quantization
from megatron_mopd.step_metrics import QuantizationMetrics, StepMetrics
from megatron_mopd.types import Cell

# isort: split
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging


class Learner:
    """The student of this process group, on this rank. Needs `parallel.initialize_parallel` with the config's layout.

    `step` counts the updates since the weights were loaded. Every method is collective: all ranks call it.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.layout = Layout.from_table(config.megatron)
        self.objective = build_objective(config.objective)
        hf_config = read_hf_config(config.student.checkpoint)
        architecture = family_of(hf_config).architecture(hf_config)
        self.vocab_size = architecture.vocab_size
        self._table = split_megatron_table(config.megatron)
        check_optimizer_options(self._table)
        check_quantization(config.quantization, architecture.transformer, self.layout.etp, config.megatron)
        if config.rollout.router_replay:
            check_router_replay(self._table, hf_config)
        self.models = build_model(config.megatron, hf_config, config.quantization.experts != "none")
        BalancedRouter.install(self.models)
        self.replay = RouterReplay(self.models, config.rollout.router_replay)
        self.teacher_heads: TeacherHeads | None = None
        if self.models[-1].post_process:
            head = LogprobHead.install(self.models[-1], self.vocab_size, config.rollout.temperature)
            if self.objective.divergence is not None:
                self.teacher_heads = TeacherHeads(config.teachers.models, head)
        self.experts = QuantizedExperts(self.models, config.quantization)
        self.chunks = wrap(self.models, self._table)
        self.load_hf(config.student.checkpoint)
        stream = HfStream(self.models, config.student.checkpoint)
        self._weight_bytes = stream.num_bytes(config.quantization.experts != "none")

    def load_hf(self, folder: Path) -> None:
        """Start anew from the weights of a Hugging Face folder of the same architecture: step 0, fresh optimizer."""
        self.sync_params()
        weights.load_hf(self.models, folder)
        self._source = folder
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        """Fresh optimizer state and schedule at step 0, for the weights as they are."""
        self.step = 0
        self.optimizer, self.scheduler = build_optimizer(self.chunks, self._table, self.config.run.num_steps)

    def resume_at(self, step: int) -> None:
        """Set the step and the schedule with it, after weights and optimizer state were loaded."""
        self.step = self.scheduler.num_steps = step
        self.scheduler.step(0)

    def update(self, batch: Rows) -> StepMetrics:
        """One optimizer step on the whole batch. Raises UserError where the loss or the gradient is not finite."""
        assert len(batch), "an update needs a trajectory"
        num_cells = len(batch.cells)
        row_weights, factors = batch_weights(batch, self.config.objective)
        hidden = () if self.teacher_heads is None else ("teacher_hidden",)
        mine, num_packed = self._micro_batches(batch, row_weights, hidden)
        self._refuse_unless_routed(mine)
        self._refuse_unless_hidden(mine)
        self._refuse_unless_compared(batch)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        agreement = Agreement(num_cells)
        loss_of_micro, ask = partial(self._loss, num_cells, num_packed), partial(self._ask, batch.cells)
        sums = reduce_sums(self._run(mine, loss_of_micro, agreement, ask), num_cells)
        loss = total_loss(sums)
        self._refuse_unless_finite("loss", loss)
        self.scheduler.step(1)
        _, grad_norm, _ = self.optimizer.step()  # pyright: ignore[reportGeneralTypeIssues]  (annotated as returning None)
        self._refuse_unless_finite("gradient norm", grad_norm)
        self.step += 1
        quantization = self._measure_experts()
        return StepMetrics(
            step=self.step,
            loss=loss,
            grad_norm=float(grad_norm),
            learning_rate=get_canonical_lr_for_logging(self.optimizer.param_groups) or 0.0,
            num_tokens=int(batch.lengths.sum()),
            num_micro_batches=len(mine),
            cells=cell_metrics(
                sums,
                agreement.reduce(),
                batch.cells,
                batch.cell,
                factors,
                self.config.objective,
            ),
            has_teacher=self.config.objective.needs_teachers,
            quantization=quantization,
            weight_bytes=self._weight_bytes,
        )

    def _measure_experts(self) -> QuantizationMetrics | None:
        found = None
        if self.step % self.config.quantization.report_every_steps == 0:
            self.sync_params()
            found = self.experts.measure()
        self.experts.forget()  # a copy of all experts, which nobody asks for before the next schedule
        return found

    @torch.no_grad()
    def logprobs(self, batch: Rows) -> np.ndarray:
        """Student log-prob of every token [N] float32 on every rank, 0 for the first of a row. Changes nothing."""
        mine, kept = self._evaluate(batch)
        return collect_logprobs(mine, kept, int(batch.lengths.sum())).cpu().numpy()

    @torch.no_grad()
    def routes(self, batch: Rows) -> np.ndarray:
        """The experts that the routers choose, int16 [N, L, K] as Batch.routed_experts, on every rank. Changes nothing.

        Needs rollout.router_replay. A router chooses itself here, after layers that took the experts the batch has.
        """
        recorder = self.replay.recorder(int(batch.lengths.sum()))
        self._evaluate(batch, recorder)
        return recorder.reduce()

    def export(self, folder: Path) -> None:
        """Write the weights as a Hugging Face folder, with the tokenizer and config of the folder they came from."""
        self.sync_params()
        weights.export_hf(self.models, self._source, folder, self.experts.value_of)
        if self.config.quantization.audit:
            audit_export(self.models, folder, self.config.quantization)

    def sync_params(self) -> None:
        """Wait for weights that are still on their way from the last step (overlap_param_gather)."""
        for chunk in self.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def _evaluate(self, batch: Rows, observer: Observer | None = None) -> tuple[list[DeviceMicroBatch], list[Tensor]]:
        """This rank's micro-batches, and the log-probs of each on ranks of the last stage."""
        mine, _ = self._micro_batches(batch, np.zeros(len(batch), np.float32))
        for chunk in self.chunks:
            chunk.eval()
        parts = self._run(mine, keep_logprobs, observer, score_all, forward_only=True)
        for chunk in self.chunks:
            chunk.train()
        return mine, parts

    def _micro_batches(
        self, batch: Rows, row_weights: np.ndarray, optional: Sequence[str] = ()
    ) -> tuple[list[DeviceMicroBatch], int]:
        max_tokens = self.config.learner.micro_batch_tokens
        routes = ("routed_experts",) if self.config.rollout.router_replay else ()
        return micro_batches(batch, row_weights, self.layout, max_tokens, self.vocab_size, (*routes, *optional))

    def _run(
        self,
        mine: Sequence[DeviceMicroBatch],
        loss: LossFunction,
        observer: Observer | None,
        ask: Ask,
        forward_only: bool = False,
    ) -> list[Tensor]:
        """Megatron's schedule over the micro-batches; what `loss` keeps of each, on ranks of the last stage."""
        self.experts.forget()
        prepare = partial(self.replay.aim, observer=observer)
        kept = run_schedule(self.chunks, mine, loss, forward_only=forward_only, ask=ask, prepare=prepare)
        self.experts.check_used()
        self.replay.check_idle()
        return kept

    def _ask(self, cells: Sequence[Cell], head: LogprobHead, micro: DeviceMicroBatch) -> AbstractContextManager[None]:
        """What the objective needs of the head."""
        coefficients = partial(self._coefficients, micro.columns)
        if self.objective.divergence is None:
            return head.learning(micro.target_T, coefficients)
        assert self.teacher_heads is not None
        teachers = self.teacher_heads.rows(cells, micro)
        return head.comparing(micro.target_T, coefficients, self.objective.divergence, teachers)

    def _coefficients(self, columns: TokenColumns, logprobs_c: Tensor, index_c: Tensor) -> Tensor:
        """Of the c tokens at `index_c`."""
        return self.objective(logprobs_c, TokenColumns(*(column_T[index_c] for column_T in columns))).coefficient_T

    def _loss(
        self, num_cells: int, num_packed: int, micro: DeviceMicroBatch, output: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        columns = TargetLogprobs if self.objective.divergence is None else TargetDivergence
        scored = columns(*output[0, :, :-1].detach().unbind(-1))
        terms = self.objective(scored.logprobs_T, micro.columns)
        loss = output[0, :, -1].sum() * num_packed
        num_tokens = torch.tensor(output.shape[1], dtype=torch.int, device=device.DEVICE)
        return loss, num_tokens, micro_batch_sums(terms, micro, scored, num_cells, weight_version=self.step)

    def _refuse_unless_routed(self, mine: Sequence[DeviceMicroBatch]) -> None:
        bare = any(micro.routed_experts is None and micro.columns.loss_mask_T.any() for micro in mine)
        if self.config.rollout.router_replay and bare:
            raise UserError(
                f"the batch of step {self.step + 1} has no routed experts; turn rollout.router_replay off, or let the "
                "rollout engine record them"
            )

    def _refuse_unless_hidden(self, mine: Sequence[DeviceMicroBatch]) -> None:
        bare = any(micro.teacher_hidden_SD is None and micro.columns.loss_mask_T.any() for micro in mine)
        if self.teacher_heads is not None and bare:
            raise UserError(
                f"the batch of step {self.step + 1} has no hidden states of the teachers; objective.name="
                f"{self.config.objective.name} needs batches that were scored for it"
            )

    def _refuse_unless_compared(self, batch: Rows) -> None:
        if self.config.objective.needs_outcomes and batch.outcome_advantage is None:
            raise UserError(
                f"the batch of step {self.step + 1} has no advantages of outcomes; objective.name="
                f"{self.config.objective.name} needs batches that were sampled for it"
            )

    def _refuse_unless_finite(self, what: str, value: float) -> None:
        if not math.isfinite(value):
            raise UserError(
                f"the {what} of step {self.step + 1} is {value}; go on from the last checkpoint with a lower "
                "megatron.lr, megatron.clip_grad or objective.r_max"
            )
