"""The bodies of POST /score on the wire, in both directions: safetensors byte strings. See docs/teacher_service.md.

    request   token_ids        integers [N]: prompt, response, prompt, ...
              prompt_lengths   integers [n]
              response_lengths integers [n]
              metadata         version, teacher, temperature, fingerprint, hidden "1" where they are asked for
    reply     logprobs         float32 [sum of response_lengths]
              hidden           [sum of response_lengths, D] float32, or uint16: the bits of bfloat16
              metadata         version, teacher, fingerprint, key

Integers are uint16 where all of them fit (token ids: where the vocabulary has at most 65536 tokens), else int32.

Promises (tests/unit/test_service_body.py): what is encoded is decoded to the same numbers; a body that is cut, foreign
or inconsistent raises BadBody with the reason, and nothing else. Torch-free.

Shape suffixes: N tokens of all rows, n rows, R response tokens of all rows, D width of the teacher.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import safetensors
from safetensors.numpy import save

from megatron_mopd.token_rows import TokenRows

VERSION = "1"
SMALL_VOCABULARY = 1 << 16
_INTEGERS = ("U16", "I32")
_HIDDEN = ("U16", "F32")
_DTYPES = {"U16": np.dtype("<u2"), "I32": np.dtype("<i4"), "F32": np.dtype("<f4")}


class BadBody(ValueError):
    """Bytes that are no body of this format; the message says why."""


@dataclass(frozen=True)
class ScoreCall:
    """One request. JSON callers may leave temperature and fingerprint out."""

    teacher: str
    rows: TokenRows
    temperature: float | None = None
    fingerprint: str | None = None
    with_hidden: bool = False

    def digest(self) -> bytes:
        """A hash of what is asked. Not of the body: safetensors writes metadata in no particular order."""
        words = [self.teacher, self.temperature, self.fingerprint, self.with_hidden, len(self.rows)]
        hashed = hashlib.blake2b(json.dumps(words).encode(), digest_size=16)
        hashed.update(self.rows.prompt_lengths.astype("<i8", copy=False).tobytes())
        hashed.update(self.rows.response_lengths.astype("<i8", copy=False).tobytes())
        hashed.update(self.rows.token_ids.astype("<i4", copy=False).tobytes())
        return hashed.digest()


@dataclass(frozen=True)
class ScoreReply:
    """`logprobs` float32 [R] of all rows, in the order of the request; `key` is the request's Idempotency-Key; `hidden`
    [R, D] if they were asked for, see scores.py."""

    teacher: str
    fingerprint: str
    key: str
    logprobs: np.ndarray
    hidden: np.ndarray | None = None


def encode_call(call: ScoreCall, vocab_size: int) -> bytes:
    """Token ids must be below `vocab_size`: the smaller integer type would wrap them."""
    assert call.temperature is not None
    assert call.fingerprint is not None
    token_ids_N = call.rows.token_ids
    assert 0 <= token_ids_N.min(initial=0) <= token_ids_N.max(initial=0) < vocab_size
    tensors = {
        "token_ids": token_ids_N.astype(np.uint16 if vocab_size <= SMALL_VOCABULARY else np.int32),
        "prompt_lengths": _shortest(call.rows.prompt_lengths),
        "response_lengths": _shortest(call.rows.response_lengths),
    }
    words = {"teacher": call.teacher, "temperature": repr(call.temperature), "fingerprint": call.fingerprint}
    words |= {"hidden": "1"} if call.with_hidden else {}
    return save(tensors, {"version": VERSION, **words})


def _shortest(lengths_n: np.ndarray) -> np.ndarray:
    return lengths_n.astype(np.uint16 if lengths_n.max(initial=0) < 1 << 16 else np.int32)


def decode_call(body: bytes) -> ScoreCall:
    tensors, metadata = _read(body, dict.fromkeys(("token_ids", "prompt_lengths", "response_lengths"), _INTEGERS))
    _check_words(metadata, "teacher", "temperature", "fingerprint")
    if (hidden := metadata.get("hidden", "0")) not in ("0", "1"):
        raise BadBody(f"hidden is {hidden!r}; expected is '1' or nothing")
    prompts_n, responses_n = tensors["prompt_lengths"], tensors["response_lengths"]
    if len(prompts_n) != len(responses_n):
        raise BadBody(f"{len(prompts_n)} prompt_lengths, but {len(responses_n)} response_lengths")
    if min(prompts_n.min(initial=0), responses_n.min(initial=0)) < 0:
        raise BadBody("a length is negative")
    rows = TokenRows(tensors["token_ids"].astype(np.int32), prompts_n.astype(np.int64), responses_n.astype(np.int64))
    if (total := int(rows.lengths.sum())) != len(rows.token_ids):
        raise BadBody(f"lengths add up to {total}, but there are {len(rows.token_ids)} token_ids")
    temperature = _temperature(metadata["temperature"])
    return ScoreCall(metadata["teacher"], rows, temperature, metadata["fingerprint"], with_hidden=hidden == "1")


def encode_reply(reply: ScoreReply) -> bytes:
    words = {"teacher": reply.teacher, "fingerprint": reply.fingerprint, "key": reply.key}
    tensors = {"logprobs": reply.logprobs.astype(np.float32, copy=False)}
    if reply.hidden is not None:
        tensors["hidden"] = reply.hidden
    return save(tensors, {"version": VERSION, **words})


def decode_reply(body: bytes) -> ScoreReply:
    tensors, metadata = _read(body, {"logprobs": ("F32",)}, {"hidden": _HIDDEN})
    _check_words(metadata, "teacher", "fingerprint", "key")
    words = (metadata["teacher"], metadata["fingerprint"], metadata["key"])
    return ScoreReply(*words, tensors["logprobs"], tensors.get("hidden"))


def split(values: np.ndarray, lengths: Sequence[int] | np.ndarray) -> list[np.ndarray]:
    """Consecutive pieces of these lengths, which add up to all of it."""
    return np.split(values, np.cumsum(np.asarray(lengths, np.int64))[:-1]) if len(lengths) else []


def _read(
    body: bytes, expected: Mapping[str, Sequence[str]], optional: Mapping[str, Sequence[str]] | None = None
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The tensors of a safetensors byte string, and its metadata. Those that must be there have one axis, those that
    may be there two."""
    try:
        stored = dict(safetensors.deserialize(body))
        header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
    except (safetensors.SafetensorError, ValueError) as error:
        raise BadBody(f"it is no whole safetensors byte string ({error})") from None
    metadata = header.get("__metadata__") or {}
    if metadata.get("version") != VERSION:
        raise BadBody(f"its metadata says version {metadata.get('version')!r}; this is version {VERSION}")
    optional = optional or {}
    if not expected.keys() <= stored.keys() <= expected.keys() | optional.keys():
        raise BadBody(f"it holds {sorted(stored) or 'no tensor'}; expected are {', '.join(sorted(expected))}")
    tensors = {}
    for name, tensor in stored.items():
        dtype, shape = tensor["dtype"], tensor["shape"]
        dtypes, axes = (expected[name], "one axis") if name in expected else (optional[name], "two axes")
        if dtype not in dtypes or len(shape) != (1 if name in expected else 2):
            raise BadBody(f"{name} is {dtype} {shape}; expected is {axes} of {' or '.join(dtypes)}")
        tensors[name] = np.frombuffer(tensor["data"], _DTYPES[dtype]).reshape(shape)
    return tensors, metadata


def _check_words(metadata: Mapping[str, str], *names: str) -> None:
    for name in names:
        if name not in metadata:
            raise BadBody(f"its metadata has no {name}")


def _temperature(text: str) -> float:
    try:
        temperature = float(text)
    except ValueError:
        temperature = math.nan
    if not math.isfinite(temperature):
        raise BadBody(f"temperature {text!r} is no number")
    return temperature
