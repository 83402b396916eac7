"""The rows of an output layer that a rank has: what logits say of targets, block by block, and summed over the ranks.

Logits are float32, from factors in the model's dtype (products.py). Those of a block of tokens and columns exist at
once, never those of all columns. The mathematics is in objectives/logprob_head.py.

Promises (tests/parity/test_logprob_head.py): a scoring pass has two all-reduces; results depend on neither the number
of ranks nor how many tokens are taken at a time, beyond rounding.

Shape suffixes: T packed tokens, S some of them, c those of a chunk, D width, v this rank's vocabulary without padding,
b a block of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mopd.mcore.exponentials import add_exponentials
from megatron_mopd.mcore.products import product
from megatron_mopd.mcore.token_chunks import TokenChunks
from megatron_mopd.objectives.logprob_head import (
    TargetLogprobs,
    Targets,
    all_reduce,
    in_cache,
    is_cut,
    owned,
    target_logprobs,
)

SCRATCH_BYTES = {"cuda": 1 << 30, "cpu": 1 << 29}
"""Of what a chunk of tokens times this rank's vocabulary takes in training. Large, because each chunk reads and writes
the weight's whole gradient."""

LOGITS = {"cuda": 1 << 27, "cpu": 1 << 19}
"""Tokens times columns that exist at once, in float32: so many that a product is worth its call, on a CPU so few that
they stay in its cache."""

COLUMNS = 1 << 9
"""Of them at least: narrower products are slower."""


def chunk_of(num_tokens: int, num_columns: int, bytes_of_logit: int, device: torch.device) -> int:
    """The tokens of a chunk that fills the scratch memory."""
    return max(1, min(num_tokens, SCRATCH_BYTES[device.type] // (bytes_of_logit * num_columns)))


def block_of(chunk: int, num_columns: int, device: torch.device) -> int:
    """The columns whose logits exist at once: what there is room for beside a chunk's tokens, a quarter at most."""
    return max(64, min(max(COLUMNS, LOGITS[device.type] // max(1, chunk)), -(-num_columns // 4)))


class VocabSlice:
    """`weight_vD` are the rows of the tokens from `vocab_start` on; those of other tokens are at other ranks of
    `group` (None: there are none)."""

    def __init__(
        self, weight_vD: Tensor, vocab_start: int, temperature: float, group: dist.ProcessGroup | None, block: int
    ) -> None:
        """`block` is the number of columns whose logits exist at once, of as many tokens as LOGITS has room for."""
        self.weight_vD, self.vocab_start, self.temperature = weight_vD, vocab_start, temperature
        self.group = group if group is not None and group.size() > 1 else None
        self.block, v = block, len(weight_vD)
        self.blocks = [slice(start, min(start + block, v)) for start in range(0, v, block)]

    def of_teacher(self, weight_vD: Tensor) -> VocabSlice:
        """The same rows of another layer."""
        return VocabSlice(weight_vD, self.vocab_start, self.temperature, self.group, self.block)

    @torch.no_grad()
    def score(self, hidden_TD: Tensor, target_T: Tensor, chunk: int) -> TargetLogprobs:
        """Log-probs of all targets, `chunk` at a time. Two all-reduces, and two more where some are very small."""
        targets = self.targets(TokenChunks(hidden_TD, chunk), target_T)
        sums_3T = self._all_sums(hidden_TD, targets, chunk)
        if (again_T := is_cut(sums_3T)).any():
            hidden_SD = hidden_TD[again_T]
            few = targets.at(again_T).referring_to(self.largest(hidden_SD, chunk))
            sums_3T[:, again_T] = self._all_sums(hidden_SD, few, chunk)
            targets.offset_T[again_T] = few.offset_T
        return target_logprobs(sums_3T, targets.offset_T)

    def targets(self, tokens: TokenChunks, target_T: Tensor) -> Targets:
        """Each compared with itself. One all-reduce."""
        column_T = target_T - self.vocab_start
        logit_T = torch.zeros(column_T.shape, dtype=torch.float32, device=column_T.device)
        for part in tokens:  # also on a rank without rows: a chunk may have to be gathered
            if self.blocks:
                is_owned_c, column_c = owned(column_T[part.index_c], len(self.weight_vD))
                logit_c = torch.cat(
                    [
                        (part.hidden_cD[rows].float() * self.weight_vD[column_c[rows]]).sum(-1)
                        for rows in in_cache(part.hidden_cD)
                    ]
                )
                logit_T[part.index_c] = logit_c.where(is_owned_c, 0.0) / self.temperature
        all_reduce(logit_T, dist.ReduceOp.SUM, self.group)
        return Targets(column_T, logit_T, torch.zeros_like(logit_T))

    def sums(self, hidden_cD: Tensor, targets: Targets, e_cv: Tensor | None = None) -> Tensor:
        """S, U, Q [3, c] of this rank's columns, and E itself into `e_cv`."""
        sums_3c = torch.zeros(3, len(hidden_cD), dtype=torch.float32, device=hidden_cD.device)
        for rows, columns, logits_cb in self._logits(hidden_cD):
            some, e_cb = targets.at(rows), None if e_cv is None else e_cv[rows, columns]
            column_c = some.column_T - columns.start
            add_exponentials(logits_cb, some.reference_T, column_c, self.temperature, sums_3c[:, rows], e_cb)
        return sums_3c

    def largest(self, hidden_SD: Tensor, chunk: int) -> Tensor:
        """The largest logit of each row divided by the temperature, [S]. One all-reduce."""
        largest_S = torch.full(hidden_SD.shape[:1], -torch.inf, dtype=torch.float32, device=hidden_SD.device)
        for largest_c, hidden_cD in zip(largest_S.split(chunk), hidden_SD.split(chunk), strict=True):
            for rows, _, logits_cb in self._logits(hidden_cD):
                torch.maximum(largest_c[rows], logits_cb.amax(-1), out=largest_c[rows])
        all_reduce(largest_S, dist.ReduceOp.MAX, self.group)
        return largest_S / self.temperature

    def logits(self, hidden_cD: Tensor) -> Tensor:
        """All of this rank's [c, v], divided by the temperature."""
        logits_cv = torch.empty(len(hidden_cD), len(self.weight_vD), dtype=torch.float32, device=hidden_cD.device)
        for rows, columns, logits_cb in self._logits(hidden_cD):
            logits_cv[rows, columns] = logits_cb
        return logits_cv if self.temperature == 1.0 else logits_cv.div_(self.temperature)

    def _all_sums(self, hidden_TD: Tensor, targets: Targets, chunk: int) -> Tensor:
        parts = [self.sums(part.hidden_cD, targets.at(part.index_c)) for part in TokenChunks(hidden_TD, chunk)]
        sums_3T = torch.cat([hidden_TD.new_zeros(3, 0).float(), *parts], dim=1)
        all_reduce(sums_3T, dist.ReduceOp.SUM, self.group)
        return sums_3T

    def _logits(self, hidden_cD: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
        """Block by block of tokens and columns, in one buffer."""
        c, most = len(hidden_cD), max(1, LOGITS[hidden_cD.device.type] // self.block)
        buffer = torch.empty(min(c, most) * self.block, dtype=torch.float32, device=hidden_cD.device)
        for rows in (slice(start, min(start + most, c)) for start in range(0, c, most)):
            for columns in self.blocks:
                shape = rows.stop - rows.start, columns.stop - columns.start
                logits_cb = buffer[: shape[0] * shape[1]].view(shape)
                product(hidden_cD[rows], self.weight_vD[columns].t(), logits_cb)
                yield rows, columns, logits_cb
