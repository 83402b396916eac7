"""The token log of a request: what it takes from a server, and what it refuses."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from megatron_mopd.errors import UserError
from megatron_mopd.protocols import EndpointDown, SampleRequest
from megatron_mopd.sglang.reply_log import ReplyLog

URL = "http://a:1"
REQUEST = SampleRequest("t-7", (1, 2, 3), 6, (9,), routed_positions=1)


def log(routed_shape: tuple[int, int] | None = None) -> ReplyLog:
    new = ReplyLog(REQUEST, 4, "run-v4", vocab_size=100, routed_shape=routed_shape)
    new.continuation()
    return new


def reply(ids: list[int], total: int, reason: dict[str, Any] | None = None, **meta: Any) -> dict[str, Any]:
    return {
        "output_ids": ids,
        "meta_info": {
            "weight_version": "run-v4",
            "finish_reason": reason,
            "completion_tokens": total,
            "output_token_logprobs": [[-0.5 * i, i, None] for i in ids],
            **meta,
        },
    }


LENGTH, EOS = {"type": "length", "length": 6}, {"type": "stop", "matched": 50}
ABORT = {"type": "abort", "message": "Abort in waiting queue"}


def test_messages_add_up_to_the_segment() -> None:
    t = log()
    assert not t.add(reply([5, 6], 2), URL)
    assert t.add(reply([7, 9], 4, {"type": "stop", "matched": 9}), URL)
    assert t.segment.token_ids == (5, 6, 7, 9)
    assert t.segment.logprobs == (-2.5, -3.0, -3.5, -4.5)
    assert (t.segment.finish_reason, t.segment.weight_version) == ("stop", 4)


def test_the_next_server_gets_what_is_left() -> None:
    """Fault 35: prompt 3, limit 6, 4 received: the next request asks for 2 after 7."""
    t = log()
    t.add(reply([5, 6, 7, 8], 4), URL)
    body = t.continuation()
    assert body["input_ids"] == [1, 2, 3, 5, 6, 7, 8]
    assert body["sampling_params"]["max_new_tokens"] == 2
    t.add(reply([11, 12], 2, LENGTH), "http://b:2")
    assert t.segment.token_ids == (5, 6, 7, 8, 11, 12)
    assert t.ended == "length"


def test_the_models_own_end_id_ends_nothing() -> None:
    t = log()
    assert t.add(reply([5, 50], 2, EOS), URL)
    assert t.ended is None
    assert t.segment.finish_reason == "abort"


@pytest.mark.parametrize(
    ("ids", "total"), [([6], 2), ([5, 6, 6], 2), ([6], 1)], ids=["sent again", "with what was waiting", "nothing new"]
)
def test_an_abort_that_repeats_tokens_adds_none_twice(ids: list[int], total: int) -> None:
    """SGLang sends the last token once more with the echo of an abort, and merges messages that nobody has taken."""
    t = log()
    received = 0 if len(ids) == 3 else total
    if received:
        t.add(reply([5, 6][:received], received), URL)
    with pytest.raises(EndpointDown, match="aborted t-7: Abort in waiting queue"):
        t.add(reply(ids, total, ABORT), URL)
    assert t.token_ids == [5, 6][:total]


@pytest.mark.parametrize("meta", [{"weight_version": "default"}, {"weight_versions": [{"version": "run-v3"}]}])
def test_tokens_of_other_weights_are_left_out(meta: dict[str, Any]) -> None:
    t = log()
    t.add(reply([5], 1), URL)
    with pytest.raises(EndpointDown, match=r"serves '(default|run-v3)', not 'run-v4'"):
        t.add(reply([6], 2, **meta), URL)
    assert t.token_ids == [5]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (reply([5], 1, output_token_logprobs=[[None, 5, None]]), "sent log-prob None for token 5"),
        (reply([5], 1, output_token_logprobs=[[float("nan"), 5, None]]), "sent log-prob nan for token 5"),
        (reply([5], 1, output_token_logprobs=[[float("-inf"), 5, None]]), "sent log-prob -inf for token 5"),
        (reply([5], 1, output_token_logprobs=[]), "1 token ids and 0 log-probs where 1 of each were due"),
        (reply([5, 6], 3), "2 token ids and 2 log-probs where 3 of each were due"),
        (reply([5], 1, output_token_logprobs=[[-1.0, 6, None]]), "sent token 5 with the log-prob of 6"),
        (reply([100], 1), "sent token 100"),
        (reply([9, 5], 2), "sent token 5"),
        (reply([5], 1, {"type": "stop", "matched": "NaN happened"}), "computed NaN"),
        (reply([5], 1, LENGTH), "has room for 1 of 6 tokens after 3; raise its context_length"),
        (reply([], 0, {"type": "abort", "message": "too long", "status_code": 400}), "refused: too long"),
    ],
)
def test_a_bad_reply_names_trajectory_and_server(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"^t-7: server {URL} .*{message}"):
        log().add(bad, URL)


def test_routes_are_those_of_the_last_attempt() -> None:
    """Positions [1, 3 + 6 - 1) of two layers, top-2."""
    routes = np.arange(7 * 2 * 2, dtype=np.int32)
    t = log((2, 2))
    t.add(reply([5, 50], 2, EOS, routed_experts=base64.b64encode(routes[: 3 * 4].tobytes())), URL)
    assert t.continuation()["routed_experts_start_len"] == 1
    t.add(reply([6, 7, 8, 4], 4, LENGTH, routed_experts=base64.b64encode(routes.tobytes())), URL)
    got = t.segment.routed_experts
    assert got is not None
    np.testing.assert_array_equal(got, routes.reshape(7, 2, 2))
    assert got.dtype == np.int16


def test_a_segment_that_outgrew_its_routes_has_none() -> None:
    """The next segment then covers its positions too (types.Segment); too few routes would end the run."""
    t = log((2, 2))
    t.add(reply([5, 50], 2, EOS, routed_experts=base64.b64encode(np.zeros(3 * 4, np.int32).tobytes())), URL)
    t.continuation()
    assert t.segment.routed_experts is not None, "nothing came after them yet"
    t.add(reply([6], 1), URL)
    assert t.segment.routed_experts is None


def test_routes_must_be_there_and_fit() -> None:
    with pytest.raises(UserError, match="sent no routes; it must run with --enable-return-routed-experts"):
        log((2, 2)).add(reply([9], 1, {"type": "stop", "matched": 9}), URL)
    routes = base64.b64encode(np.zeros(5, np.int32).tobytes())
    with pytest.raises(UserError, match="sent 5 routed experts for 2 positions of 2 layers and top-2"):
        log((2, 2)).add(reply([9], 1, {"type": "stop", "matched": 9}, routed_experts=routes), URL)
