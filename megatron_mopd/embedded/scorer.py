"""Frozen teachers in this process: one prefill per batch of trajectories, one log-prob per response token.

    logprobs[j] = log softmax(logits at the position before response[j] / temperature)[response[j]]

Promises (tests/contract/test_scorer.py): float32; aligned by position from the left, so that an empty response gives an
empty array and a padding id that equals a real one changes nothing; only response positions go through the output
layer, and never more at once than fill `_LOGITS` entries; the same requests give the same bits, whatever else runs. All
teachers stay in memory.

Shape suffixes: B rows, T columns, N response tokens of a pass, n those of a chunk, D width, V vocabulary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatron_mopd.embedded.models import hidden_states, load_model, output_layer
from megatron_mopd.errors import UserError
from megatron_mopd.protocols import ScoreRequest

_PASS_TOKENS = 2048  # padded tokens of one forward pass; more leave the cache of the CPU and run slower
_LOGITS = 1 << 22  # entries of the largest logits tensor


class EmbeddedScorer:
    """Implements protocols.TeacherScorer: `teachers` maps names to Hugging Face folders."""

    url = "in the driver"

    def __init__(
        self, teachers: Mapping[str, Path], *, temperature: float = 1.0, num_threads: int = 1, num_workers: int = 2
    ):
        self._models = {name: load_model(folder) for name, folder in teachers.items()}
        self._temperature = temperature
        self._threads = ThreadPoolExecutor(
            num_workers, "scorer", initializer=torch.set_num_threads, initargs=(num_threads,)
        )

    async def prepare(self, teacher: str) -> None:
        """They were loaded at construction."""
        self._check_name(teacher)

    async def score(self, teacher: str, requests: Sequence[ScoreRequest]) -> list[np.ndarray]:
        self._check_name(teacher)
        for request in requests:
            if not request.prompt_ids:
                raise ValueError(
                    f"{request.trajectory_id}: an empty prompt leaves the first response token without context"
                )
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._score, teacher, list(requests))

    async def close(self) -> None:
        self._threads.shutdown()

    def _check_name(self, teacher: str) -> None:
        if teacher not in self._models:
            raise UserError(f"no teacher named {teacher}; known: {', '.join(self._models)}")

    def _score(self, teacher: str, requests: list[ScoreRequest]) -> list[np.ndarray]:
        model = self._models[teacher]
        scores = [np.zeros(0, np.float32)] * len(requests)
        with torch.inference_mode():
            for rows in _passes(requests):
                scored = _score_pass(model, [requests[row] for row in rows], self._temperature)
                for row, logprobs in zip(rows, scored, strict=True):
                    if not np.isfinite(logprobs).all():
                        raise UserError(
                            f"teacher {teacher} gives non-finite log-probs for trajectory "
                            f"{requests[row].trajectory_id}; use another checkpoint"
                        )
                    scores[row] = logprobs
        return scores


def _passes(requests: Sequence[ScoreRequest]) -> Iterator[list[int]]:
    """Rows of similar length, longest first; rows without a response need none."""
    rows = [row for row, request in enumerate(requests) if request.response_ids]
    rows.sort(key=lambda row: -requests[row].num_tokens)
    while rows:
        count = max(1, _PASS_TOKENS // requests[rows[0]].num_tokens)
        yield rows[:count]
        rows = rows[count:]


def _score_pass(model: PreTrainedModel, requests: Sequence[ScoreRequest], temperature: float) -> list[np.ndarray]:
    """Score one padded batch. The last token of a row predicts nothing and is not fed."""
    token_ids_BT = np.zeros((len(requests), max(r.num_tokens for r in requests) - 1), np.int64)
    for row, request in enumerate(requests):
        token_ids_BT[row, : request.num_tokens - 1] = (*request.prompt_ids, *request.response_ids)[:-1]
    counts_B = [len(r.response_ids) for r in requests]
    row_N = np.repeat(np.arange(len(requests)), counts_B)
    column_N = np.concatenate([np.arange(len(r.prompt_ids), r.num_tokens) for r in requests]) - 1
    target_N = torch.tensor([token for r in requests for token in r.response_ids])
    hidden_ND = hidden_states(model, torch.from_numpy(token_ids_BT))[row_N, column_N]
    logprobs_N = _token_logprobs(model, hidden_ND, target_N, temperature)
    return np.split(logprobs_N.numpy(), np.cumsum(counts_B)[:-1])


def _token_logprobs(model: PreTrainedModel, hidden_ND: Tensor, target_N: Tensor, temperature: float) -> Tensor:
    head = output_layer(model)
    count = max(1, _LOGITS // model.config.vocab_size)
    logprobs = []
    for hidden_nD, target_n in zip(hidden_ND.split(count), target_N.split(count), strict=True):
        logits_nV = head(hidden_nD).float() / temperature
        logprobs.append(logits_nV.gather(-1, target_n[:, None])[:, 0] - logits_nV.logsumexp(dim=-1))
    return torch.cat(logprobs)
