"""The bodies of the teacher service: the same numbers on the other side, few bytes, and no way to be misread."""

from __future__ import annotations

import contextlib
import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import save
from scoring import token_rows

from megatron_mopd.service.body import (
    SMALL_VOCABULARY,
    BadBody,
    ScoreCall,
    ScoreReply,
    decode_call,
    decode_reply,
    encode_call,
    encode_reply,
)
from megatron_mopd.token_rows import TokenRows


def call_of(count: int = 40) -> ScoreCall:
    return ScoreCall("a", token_rows(count), 0.7, "print")


@pytest.mark.parametrize("vocab_size", [250, SMALL_VOCABULARY, SMALL_VOCABULARY + 1, 1 << 31])
def test_a_request_is_decoded_to_what_was_encoded(vocab_size: int) -> None:
    highest = np.array([vocab_size - 1, 0], np.int64).astype(np.int32)
    rows = TokenRows.of([highest, highest[:1]], [highest[:0], highest])
    call = ScoreCall("teacher é", rows, 0.1 + 0.2, "0123")
    decoded = decode_call(encode_call(call, vocab_size))
    assert (decoded.teacher, decoded.temperature, decoded.fingerprint) == ("teacher é", 0.1 + 0.2, "0123")
    for (prompt, response), (got_prompt, got_response) in zip(call.rows, decoded.rows, strict=True):
        np.testing.assert_array_equal(prompt, got_prompt)
        np.testing.assert_array_equal(response, got_response)
    assert decoded.rows.token_ids.dtype == np.int32


def test_a_row_may_be_longer_than_65535_tokens() -> None:
    prompt, response = np.arange(70_000, dtype=np.int32) % 250, np.arange(3, dtype=np.int32)
    decoded = decode_call(encode_call(ScoreCall("a", TokenRows.of([prompt], [response]), 1.0, "f"), 250))
    assert (decoded.rows.prompt_lengths[0], decoded.rows.response_lengths[0]) == (70_000, 3)


def test_no_rows_are_a_request_too() -> None:
    assert len(decode_call(encode_call(ScoreCall("a", TokenRows.of([], []), 1.0, ""), 250)).rows) == 0


def test_a_reply_is_decoded_to_what_was_encoded() -> None:
    logprobs = np.array([-1e-30, -3.4e38, np.nan, 0], np.float32)
    decoded = decode_reply(encode_reply(ScoreReply("a", "print", "key", logprobs)))
    np.testing.assert_array_equal(decoded.logprobs, logprobs)
    assert (decoded.teacher, decoded.fingerprint, decoded.key) == ("a", "print", "key")


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_hidden_states_are_decoded_to_what_was_encoded(dtype: type) -> None:
    asked = decode_call(encode_call(dataclasses.replace(call_of(), with_hidden=True), 250))
    assert asked.with_hidden
    assert not decode_call(encode_call(call_of(), 250)).with_hidden
    assert asked.digest() != dataclasses.replace(asked, with_hidden=False).digest()
    hidden = np.arange(12).astype(dtype).reshape(4, 3)
    decoded = decode_reply(encode_reply(ScoreReply("a", "print", "key", np.zeros(4, np.float32), hidden)))
    assert decoded.hidden is not None
    assert decoded.hidden.dtype == dtype
    np.testing.assert_array_equal(decoded.hidden, hidden)
    for wrong in (hidden[0], hidden.astype(np.float64)):
        with pytest.raises(BadBody, match=r"hidden is .* expected is two axes of U16 or F32"):
            decode_reply(encode_reply(ScoreReply("a", "print", "key", np.zeros(4, np.float32), wrong)))


def test_a_scored_token_costs_few_bytes() -> None:
    """Two for each token there, four for each log-prob back, and the lengths. A lane of the quickstart sends 96 rows of
    16 tokens of prompt and about 9 of response."""
    rng = np.random.default_rng(0)
    prompts, responses = ([rng.integers(0, 70, n).astype(np.int32) for n in [size] * 96] for size in (16, 9))
    there = encode_call(ScoreCall("coding-high", TokenRows.of(prompts, responses), 1.0, "0123456789abcdef"), 70)
    back = encode_reply(ScoreReply("coding-high", "0123456789abcdef", "0" * 32, np.zeros(96 * 9, np.float32)))
    assert (len(there) + len(back)) / (96 * 9) <= 12


@pytest.mark.parametrize("cut", [0, 7, 8, 100, -1])
def test_a_cut_body_is_refused(cut: int) -> None:
    whole = encode_call(call_of(), 250)
    with pytest.raises(BadBody, match="no whole safetensors byte string"):
        decode_call(whole[:cut])
    with pytest.raises(BadBody, match="no whole safetensors byte string"):
        decode_reply(encode_reply(ScoreReply("a", "f", "k", np.zeros(9, np.float32)))[:cut])


def test_no_bytes_raise_anything_else() -> None:
    rng = np.random.default_rng(0)
    whole = encode_call(call_of(), 250)
    for _ in range(2000):
        body = bytearray(whole)
        for position in rng.integers(0, 400, 3):  # mostly the header
            body[position] = rng.integers(256)
        with contextlib.suppress(BadBody):
            decode_call(bytes(body))


WORDS = {"version": "1", "teacher": "a", "temperature": "1.0", "fingerprint": "f"}
TENSORS = {
    "token_ids": np.zeros(5, np.uint16),
    "prompt_lengths": np.array([2], np.int32),
    "response_lengths": np.array([3], np.int32),
}


@pytest.mark.parametrize(
    ("tensors", "words", "said"),
    [
        ({}, {"version": "2"}, "version '2'; this is version 1"),
        ({}, {"temperature": "warm"}, "temperature 'warm' is no number"),
        ({}, {"temperature": "nan"}, "is no number"),
        ({"token_ids": np.zeros(4, np.uint16)}, {}, "add up to 5, but there are 4 token_ids"),
        ({"token_ids": np.zeros(5, np.float32)}, {}, "token_ids is F32"),
        ({"token_ids": np.zeros((5, 1), np.int32)}, {}, r"token_ids is I32 \[5, 1\]"),
        ({"prompt_lengths": np.array([2, 0], np.int32)}, {}, "2 prompt_lengths, but 1 response_lengths"),
        ({"prompt_lengths": np.array([-2], np.int32)}, {}, "a length is negative"),
        ({"other": np.zeros(1, np.int32)}, {}, "it holds .*'other'"),
        ({}, {"hidden": "yes"}, "hidden is 'yes'"),
    ],
)
def test_foreign_bodies_are_refused_with_the_reason(tensors: dict, words: dict, said: str) -> None:
    assert decode_call(save(TENSORS, WORDS)).temperature == 1
    with pytest.raises(BadBody, match=said):
        decode_call(save({**TENSORS, **tensors}, {**WORDS, **words}))


def test_metadata_that_is_null_is_none() -> None:
    header = b'{"__metadata__":null}   '
    with pytest.raises(BadBody, match="version None; this is version 1"):
        decode_call(len(header).to_bytes(8, "little") + header)


@pytest.mark.parametrize("missing", ["teacher", "temperature", "fingerprint", "version"])
def test_no_word_may_be_missing(missing: str) -> None:
    with pytest.raises(BadBody, match=missing):
        decode_call(save(TENSORS, {name: word for name, word in WORDS.items() if name != missing}))


def test_a_file_of_weights_is_no_request() -> None:
    with pytest.raises(BadBody, match="version None"):
        decode_call(save({"model.embed": np.zeros((2, 2), np.float32)}))
    header = json.dumps({"__metadata__": {"version": "1"}}).encode()
    with pytest.raises(BadBody, match="it holds no tensor"):
        decode_call(len(header).to_bytes(8, "little") + header)
