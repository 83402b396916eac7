"""What the teacher service refuses of a request before it is queued, with the status and the words of the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_mopd.service.body import ScoreCall
from megatron_mopd.token_rows import TokenRows


@dataclass(frozen=True)
class Served:
    """One teacher of a service."""

    fingerprint: str
    vocab_size: int
    max_tokens: int
    """Of prompt and response together."""


class Refusal(Exception):
    """`status` is HTTP's; a retry after `retry_after_s` seconds may be accepted."""

    def __init__(self, status: int, message: str, retry_after_s: int | None = None):
        super().__init__(message)
        self.status, self.message, self.retry_after_s = status, message, retry_after_s


def check_call(call: ScoreCall, served: Mapping[str, Served], temperature: float) -> None:
    """Raise Refusal for the first thing that is wrong; a row is named by its number, from 0."""
    teacher = served.get(call.teacher)
    if teacher is None:
        raise Refusal(404, f"no teacher named {call.teacher}; known: {', '.join(served)}")
    if call.temperature is not None and call.temperature != temperature:
        raise Refusal(409, f"temperature {call.temperature:g} is asked for, {temperature:g} is served")
    if call.fingerprint is not None and call.fingerprint != teacher.fingerprint:
        raise Refusal(
            409,
            f"teacher {call.teacher} has fingerprint {teacher.fingerprint} here, {call.fingerprint} is asked for: "
            "its checkpoint is another one",
        )
    if problem := _problem(call.rows, teacher):
        raise Refusal(400, problem)


def _problem(rows: TokenRows, teacher: Served) -> str | None:
    if not rows.prompt_lengths.all():
        row = int(rows.prompt_lengths.argmin())
        return f"row {row} has an empty prompt, which leaves the first response token without context"
    if rows.lengths.max(initial=0) > teacher.max_tokens:
        row = int((rows.lengths > teacher.max_tokens).argmax())
        return f"row {row} has {rows.lengths[row]} tokens, the teacher takes {teacher.max_tokens}"
    outside = (rows.token_ids < 0) | (rows.token_ids >= teacher.vocab_size)
    if outside.any():
        token = int(outside.argmax())
        row = rows.row_of_token[token]
        return (
            f"row {row} has token id {rows.token_ids[token]}, the teacher's vocabulary has {teacher.vocab_size} tokens"
        )
    return None
