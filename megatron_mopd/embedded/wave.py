"""A wave: sequences that are sampled together, one column a step, against one key-value cache.

Rows are right-aligned: `column` is the one to be sampled next, in every row. A row that has stopped may go on in place
when its environment has answered: the new tokens are fed one a step until the row is at its end again, so that a turn
costs a few columns and no prefill.

    column            0 . . . . . . . . . . c . .
    sampled           . . p p p p r r r r r ?          known == column
    fed               p p p p r r r r r r r o o ?      known > column: o was observed
    ended             . p p p p r r . . . . . . .      waits for its successor, or to be dropped
    joined            . . . . . . . p p p p ?          behind the others, in a wave that was kept over an interruption

Which rows are in the batch at a step, and so the last bits of every log-prob, follows from the tokens alone: rows leave
once enough have ended, never by the clock.

Shape suffixes: B rows, C columns, Q query columns, V vocabulary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatron_mopd.embedded.cache import ColumnCache
from megatron_mopd.embedded.sampling import position_uniforms, sample_tokens, trajectory_key
from megatron_mopd.protocols import SampleRequest
from megatron_mopd.types import Segment

PREFILL_TOKENS = 2048
"""Most padded tokens of one forward pass of the prefill; more rows take further passes."""

MAX_FED_TOKENS = 8
"""A row goes on in place if at most this many tokens were appended; a longer observation is cheaper to prefill anew."""

_KEPT_FRACTION = 0.75
_ROW = np.dtype(
    [
        ("start", np.int64),  # first column of the prompt
        ("begin", np.int64),  # first column of the segment that is being sampled
        ("known", np.int64),  # columns from start to here hold tokens
        ("end", np.int64),  # the request's budget
        ("key", np.uint64),  # of the trajectory's noise
        ("stops", np.int64),  # index of its set of stop ids
        ("kv_version", np.int64),  # of the oldest weights in its cache
        ("active", np.bool_),
    ],
    align=True,  # torch reads the columns in place
)


@dataclass(frozen=True)
class Distribution:
    """What tokens are drawn from, and the seed of the noise."""

    seed: int
    temperature: float
    top_p: float


@dataclass(frozen=True)
class Job:
    """A request, and the future of the caller who awaits its segment."""

    request: SampleRequest
    future: asyncio.Future[Segment]


class Wave:
    """Call `advance` until `jobs` is empty; after each call, `go_on` for rows that ended, then `drop_ended`.

    Over an interruption: `keep` what is to go on; later `renew`, `go_on`, `drop_ended`, and `join` for new rows.
    """

    def __init__(self, model: PreTrainedModel, weight_version: int, distribution: Distribution, jobs: Sequence[Job]):
        self.jobs = sorted(jobs, key=lambda job: -len(job.request.token_ids))  # long with long: less padding
        self.weight_version = weight_version
        self.column = len(self.jobs[0].request.token_ids)
        self._model, self._distribution = model, distribution
        self._stops = _StopSets(model.config.vocab_size)
        self._cache = ColumnCache(len(self.jobs), model.config.num_hidden_layers)
        self.is_prefilled = False
        self._joined_from = len(self.jobs)
        self._rows = np.zeros(len(self.jobs), _ROW)
        self._token_ids_BC = np.zeros((len(self.jobs), self.column), np.int64)
        self._logprobs_BC = np.zeros((len(self.jobs), self.column), np.float32)
        self._place(range(len(self.jobs)))

    def _place(self, rows: Sequence[int]) -> None:
        """The tokens of these rows' requests end before the column that is sampled next."""
        for row in rows:
            request = self.jobs[row].request
            start = self.column - len(request.token_ids)
            self._token_ids_BC[row, start : self.column] = request.token_ids
            self._rows["start"][row] = start
            self._rows["key"][row] = trajectory_key(self._distribution.seed, request.trajectory_id)
            self._rows["kv_version"][row] = self.weight_version
            self._begin(row, request, self.column)

    def advance(self) -> list[int]:
        """Compute one column; return the rows that have ended with it, in order."""
        with torch.inference_mode():
            if self._joined_from < len(self.jobs):
                self._prefill(self._joined_from, self.column - 1)  # of which decoding feeds the last column
                self._joined_from = len(self.jobs)
            logits_BV = self._decode() if self.is_prefilled else torch.cat(self._prefill(0, self.column))
            self.is_prefilled = True
            rows = np.flatnonzero(self._rows["active"] & (self._rows["known"] == self.column))
            if len(rows) < len(self.jobs):
                logits_BV = logits_BV[torch.from_numpy(rows)]
            state = self._rows[rows]
            uniform_B = position_uniforms(state["key"], self.column - state["start"])
            rule = self._distribution
            token_B, logprob_B = sample_tokens(logits_BV, uniform_B, rule.temperature, rule.top_p)
        self._append(rows, token_B.numpy(), logprob_B.numpy())
        ended_B = self._stops.contain(state["stops"], token_B.numpy()) | (self.column == state["end"])
        self._rows["active"][rows[ended_B]] = False
        return rows[ended_B].tolist()

    @property
    def num_tokens(self) -> int:
        """Of all rows: what a cache holds of them, or will once the last ones are fed."""
        return int((self._rows["known"] - self._rows["start"]).sum())

    def segment(self, row: int, interrupted: bool = False) -> Segment:
        """What was sampled for the row's request; nothing yet, perhaps, where it was interrupted."""
        columns = slice(self._rows["begin"][row], self._rows["known"][row])
        token_ids = tuple(self._token_ids_BC[row, columns].tolist())
        logprobs = tuple(self._logprobs_BC[row, columns].tolist())
        reason = "stop" if token_ids and token_ids[-1] in self.jobs[row].request.stop_token_ids else "length"
        kv_version = int(self._rows["kv_version"][row])
        return Segment(
            token_ids,
            logprobs,
            (True,) * len(token_ids),
            self.weight_version,
            "abort" if interrupted else reason,
            kv_version=kv_version if kv_version < self.weight_version else None,
        )

    def renew(self, model: PreTrainedModel, weight_version: int) -> None:
        """Go on with these weights; what the cache holds stays as it is."""
        self._model, self.weight_version = model, weight_version

    def join(self, jobs: Sequence[Job]) -> None:
        """More rows, whose past is computed with the next column. All columns move to the right for the longest."""
        jobs = sorted(jobs, key=lambda job: -len(job.request.token_ids))
        if not jobs:
            return
        shift = max(0, len(jobs[0].request.token_ids) - self.column)
        self._joined_from = len(self.jobs)
        self.jobs += jobs
        more = ((0, len(jobs)), (shift, 0))
        self._token_ids_BC = np.pad(self._token_ids_BC, more)
        self._logprobs_BC = np.pad(self._logprobs_BC, more)
        self._cache.grow(len(jobs), shift)
        for name in ("start", "begin", "known", "end"):
            self._rows[name] += shift
        self.column += shift
        self._rows = np.concatenate([self._rows, np.zeros(len(jobs), _ROW)])
        self._place(range(self._joined_from, len(self.jobs)))

    def go_on(self, row: int, job: Job) -> int:
        """Give a row that ended in the last step, or was interrupted, its next request if that continues its tokens;
        return how many of them it has already, 0 if it does not."""
        start, known = self._rows["start"][row], self._rows["known"][row]
        held, fed = job.request.token_ids[: known - start], job.request.token_ids[known - start :]
        if len(fed) > MAX_FED_TOKENS or not np.array_equal(self._token_ids_BC[row, start:known], held):
            return 0
        self._reserve(known + len(fed))
        self._token_ids_BC[row, known : known + len(fed)] = fed
        self.jobs[row] = job
        self._begin(row, job.request, known + len(fed))
        return len(held)

    def drop_ended(self) -> None:
        """Take rows whose futures are done out of the batch, once they are enough to pay for the copy."""
        kept = [row for row, job in enumerate(self.jobs) if not job.future.done()]
        if len(kept) <= _KEPT_FRACTION * len(self.jobs):
            self.keep(kept)

    def keep(self, kept: Sequence[int]) -> None:
        """These rows, and no others."""
        self.jobs = [self.jobs[row] for row in kept]
        rows = np.array(kept, np.int64)
        self._rows, self._token_ids_BC, self._logprobs_BC = (
            self._rows[rows],
            self._token_ids_BC[rows],
            self._logprobs_BC[rows],
        )
        self._cache.keep(torch.from_numpy(rows))
        self._joined_from = len(self.jobs)

    def _begin(self, row: int, request: SampleRequest, column: int) -> None:
        self._rows["begin"][row] = self._rows["known"][row] = column
        self._rows["end"][row] = column + request.max_new_tokens
        self._rows["stops"][row] = self._stops.index(request.stop_token_ids)
        self._rows["active"][row] = True

    def _append(self, rows: np.ndarray, token_B: np.ndarray, logprob_B: np.ndarray) -> None:
        """Write the sampled column; move on to the next."""
        if not np.isfinite(logprob_B).all():
            first = self.jobs[rows[~np.isfinite(logprob_B)][0]].request.trajectory_id
            raise FloatingPointError(
                f"weights of version {self.weight_version} give non-finite logits, first for {first}"
            )
        self._reserve(self.column + 1)
        self._token_ids_BC[rows, self.column] = token_B
        self._logprobs_BC[rows, self.column] = logprob_B
        self.column += 1
        self._rows["known"][rows] = self.column

    def _reserve(self, columns: int) -> None:
        have = self._token_ids_BC.shape[1]
        if columns > have:
            more = ((0, 0), (0, max(columns - have, have)))
            self._token_ids_BC = np.pad(self._token_ids_BC, more)
            self._logprobs_BC = np.pad(self._logprobs_BC, more)

    def _prefill(self, first_row: int, end: int) -> list[Tensor]:
        """Fill the cache up to column `end`, for the rows from `first_row` on; return their logits [B, V] of it."""
        logits = []
        while first_row < len(self.jobs):
            start = int(self._rows["start"][first_row])  # rows are sorted: the first is the longest
            if start == end:
                break
            rows = slice(first_row, first_row + max(1, PREFILL_TOKENS // (end - start)))
            self._cache.aim(rows, start, start)
            mask = _prefill_mask((self._rows["start"][rows] - start).clip(max=end - start), end - start)
            logits.append(self._forward(rows, start, start, end, mask))
            first_row = rows.stop
        return logits

    def _decode(self) -> Tensor:
        """Feed the last column; return the logits [B, V] of the next."""
        rows, first = slice(0, len(self.jobs)), int(self._rows["start"].min())
        self._cache.aim(rows, first, self.column - 1)
        start_B = torch.from_numpy(self._rows["start"])
        mask = torch.arange(first, self.column) >= start_B[:, None]
        return self._forward(rows, first, self.column - 1, self.column, None if mask.all() else mask[:, None, None])

    def _forward(self, rows: slice, first: int, begin: int, end: int, mask: Tensor | None) -> Tensor:
        token_ids_BQ = torch.from_numpy(self._token_ids_BC[rows, begin:end])
        start_B = torch.from_numpy(self._rows["start"][rows])
        position_BQ = (torch.arange(begin, end) - start_B[:, None]).clamp_(min=0)
        output = self._model(
            input_ids=token_ids_BQ,
            position_ids=position_BQ,
            attention_mask=mask,
            cache=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]


def _prefill_mask(padding_B: np.ndarray, length: int) -> Tensor | None:
    """Causal mask [B, 1, Q, Q] of rows padded on the left, None if no row is. Padding sees itself, lest it be NaN."""
    if not padding_B.any():
        return None
    column_Q = torch.arange(length)
    causal_QQ = column_Q[:, None] >= column_Q
    seen_BQ = column_Q >= torch.from_numpy(padding_B)[:, None]
    return ((causal_QQ & seen_BQ[:, None]) | torch.eye(length, dtype=torch.bool))[:, None]


class _StopSets:
    """The stop ids of all rows as a table, one line for each distinct set."""

    def __init__(self, vocab_size: int):
        self._index: dict[tuple[int, ...], int] = {}
        self._table = np.zeros((0, vocab_size), np.bool_)

    def index(self, stop_token_ids: tuple[int, ...]) -> int:
        if stop_token_ids not in self._index:
            line = np.zeros((1, self._table.shape[1]), np.bool_)
            line[0, list(stop_token_ids)] = True
            self._table = np.concatenate([self._table, line])
            self._index[stop_token_ids] = len(self._index)
        return self._index[stop_token_ids]

    def contain(self, index_B: np.ndarray, token_B: np.ndarray) -> np.ndarray:
        return self._table[index_B, token_B]
