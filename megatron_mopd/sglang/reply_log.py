"""What one request has sampled so far: the tokens and log-probs that its servers have sent, checked as they arrive.

The log only grows. Where a server dies, the next one goes on from `continuation`, so a token that was received is never
sampled again. What ends the request follows from the log alone (a stop id, the budget), whatever the server thinks.

Promises (tests/unit/test_reply_log.py): one finite log-prob per token, each token of the student's vocabulary and each
message of the weights that it must come from; anything else raises an error that names trajectory and server.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_mopd.errors import UserError
from megatron_mopd.protocols import EndpointDown, SampleRequest
from megatron_mopd.types import Segment


class ReplyLog:
    """`weights`: what the servers call the weights of `weight_version`. `routed_shape`: (layers, top-k) with router
    replay. `kv_name`: what its keys and values are filed under, where those of older weights are kept: nothing of
    another name is ever used for it."""

    def __init__(
        self,
        request: SampleRequest,
        weight_version: int,
        weights: str,
        vocab_size: int,
        routed_shape: tuple[int, int] | None,
        kv_name: str | None = None,
    ):
        self.request = request
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.routed_experts: np.ndarray | None = None
        self._weight_version, self._weights = weight_version, weights
        self._vocab_size, self._routed_shape, self._kv_name = vocab_size, routed_shape, kv_name
        self.cached_tokens: int | None = None
        """Of the input of its first attempt, those whose keys and values were there."""
        self._attempt_start = 0

    @property
    def ended(self) -> str | None:
        """ "stop" or "length" once the request has all that it may get."""
        if self.token_ids and self.token_ids[-1] in self.request.stop_token_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.request.max_new_tokens else None

    @property
    def segment(self) -> Segment:
        return Segment(
            tuple(self.token_ids),
            tuple(self.logprobs),
            (True,) * len(self.token_ids),
            self._weight_version,
            self.ended or "abort",
            self.routed_experts,
            self.request.begun_at if self._may_have_older_kv else None,
        )

    @property
    def _may_have_older_kv(self) -> bool:
        begun_at = self.request.begun_at
        return self._kv_name is not None and begun_at is not None and begun_at < self._weight_version

    def continuation(self) -> dict[str, Any]:
        """The body of a request to go on from here."""
        self._attempt_start = len(self.token_ids)
        body = {
            "input_ids": [*self.request.token_ids, *self.token_ids],
            "sampling_params": {
                "max_new_tokens": self.request.max_new_tokens - len(self.token_ids),
                "stop_token_ids": self.request.stop_token_ids,
            },
            "return_logprob": True,
            "stream": True,
        }
        if self._kv_name is not None:
            body["extra_key"] = self._kv_name
        if self._routed_shape is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": self.request.routed_positions}
        return body

    def add(self, reply: Mapping[str, Any], url: str) -> bool:
        """Append the tokens of one streamed message; True when it is the last of its attempt.

        Raises EndpointDown where other weights sampled them or the server gave the request up; UserError where going on
        makes no sense.
        """
        meta = reply["meta_info"]
        self._check_weights(meta, url)
        reason = meta["finish_reason"]
        if self.cached_tokens is None:
            self.cached_tokens = int(meta.get("cached_tokens", 0))
        self._append(reply["output_ids"], meta, url, aborted=reason is not None and reason["type"] == "abort")
        if reason is None:
            return False
        self._add_routes(meta, url)
        self._check_end(reason, url)
        return True

    def _check_weights(self, meta: Mapping[str, Any], url: str) -> None:
        served = {meta["weight_version"], *(span["version"] for span in meta.get("weight_versions", ()))}
        if foreign := served - {self._weights}:
            raise EndpointDown(url, f"serves {min(foreign)!r}, not {self._weights!r}")

    def _append(self, token_ids: list[int], meta: Mapping[str, Any], url: str, aborted: bool) -> None:
        """`completion_tokens` counts all tokens of this attempt. With an abort, SGLang sends tokens again."""
        num_new = meta["completion_tokens"] - (len(self.token_ids) - self._attempt_start)
        entries = meta.get("output_token_logprobs", [])
        if aborted:
            token_ids, entries = token_ids[:num_new], entries[:num_new]
        if not len(token_ids) == len(entries) == num_new:
            raise UserError(
                f"{self._who(url)} sent {len(token_ids)} token ids and {len(entries)} log-probs where {num_new} of "
                "each were due; it must run with --incremental-streaming-output"
            )
        for token_id, (logprob, token_id_of_logprob, *_) in zip(token_ids, entries, strict=True):
            if token_id != token_id_of_logprob or not 0 <= token_id < self._vocab_size or self.ended:
                raise UserError(f"{self._who(url)} sent token {token_id} with the log-prob of {token_id_of_logprob}")
            if logprob is None or not math.isfinite(logprob):
                raise UserError(f"{self._who(url)} sent log-prob {logprob} for token {token_id}")
            self.token_ids.append(token_id)
            self.logprobs.append(logprob)
            self.routed_experts = None  # those of an earlier attempt do not reach this token

    def _add_routes(self, meta: Mapping[str, Any], url: str) -> None:
        """Every attempt asks for all from `routed_positions` on, so those of the last one are complete."""
        if self._routed_shape is None or not self.token_ids or "routed_experts" not in meta:
            return
        routes = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
        num_positions = len(self.request.token_ids) + len(self.token_ids) - 1 - self.request.routed_positions
        if routes.size != num_positions * math.prod(self._routed_shape):
            raise UserError(
                f"{self._who(url)} sent {routes.size} routed experts for {num_positions} positions of "
                f"{self._routed_shape[0]} layers and top-{self._routed_shape[1]}"
            )
        self.routed_experts = routes.reshape(num_positions, *self._routed_shape).astype(np.int16)

    def _check_end(self, reason: Mapping[str, Any], url: str) -> None:
        """A "stop" where the log has not ended is the model's own end id, which means nothing here."""
        detail = reason.get("matched") if reason["type"] == "stop" else reason.get("message")
        if detail == "NaN happened":
            raise UserError(f"{self._who(url)} computed NaN")
        if self.ended:
            if self._routed_shape is not None and self.routed_experts is None:
                raise UserError(f"{self._who(url)} sent no routes; it must run with --enable-return-routed-experts")
        elif reason["type"] == "length":
            raise UserError(
                f"{self._who(url)} has room for {len(self.token_ids)} of {self.request.max_new_tokens} tokens after "
                f"{len(self.request.token_ids)}; raise its context_length or max_total_tokens, or lower "
                "rollout.max_response_tokens"
            )
        elif reason["type"] == "abort":
            if reason.get("status_code") == 400:
                raise UserError(f"{self._who(url)} refused: {detail}")
            raise EndpointDown(url, f"aborted {self.request.trajectory_id}: {detail}")

    def _who(self, url: str) -> str:
        return f"{self.request.trajectory_id}: server {url}"
