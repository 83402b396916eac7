"""The token log on disk: what was written is read, to the bit, or refused in one line."""

from __future__ import annotations

import json
import os
import random
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mopd.errors import UserError
from megatron_mopd.prompts.source import Place
from megatron_mopd.rollout.pool import pool_of, read_pool
from megatron_mopd.rollout.token_log import Cut, Frame, TokenLog, decode, encode
from megatron_mopd.trajectory_file import prompt_record, segment_columns, segment_record
from megatron_mopd.types import Prompt, RenderedPrompt, Segment

FUZZ = int(os.environ.get("MOPD_FUZZ_EXAMPLES", "1000"))


def frames(count: int = 3) -> list[Frame]:
    """A pool of one prompt, begun and paused `count` times."""
    rng = np.random.default_rng(count)
    prompt = RenderedPrompt(Prompt("p", "law", "low", "toy", ({"role": "user", "content": "é"},)), (7, 8), (7,))
    out = [Frame({"kind": "prompt", "place": [0, 1], "names": ["1/p@0"], **prompt_record(prompt)}, {})]
    for n in range(1, count + 1):
        routes = rng.integers(0, 9, (n, 2, 2)).astype(np.int16)
        s = Segment(tuple(range(n)), tuple((-rng.random(n)).tolist()), (True,) * n, n, "abort", routes, 0)
        head = {"kind": "sample", "place": [0, 1], "sample": 0, "observed": 0, "state": {}, "finish_reason": None}
        out.append(Frame({**head, "outcome": None, "segments": [segment_record(s)]}, segment_columns([s])))
    out.append(Frame({"kind": "pool", "next": [1, 0], "prompts": [{"place": [0, 1], "done": []}]}, {}))
    return out


BYTES = b"".join(map(encode, frames()))
SIZES = [len(encode(f)) for f in frames()]


def assert_equal(got: list[Frame], want: list[Frame]) -> None:
    for a, b in zip(got, want, strict=True):
        assert json.loads(json.dumps(a.head)) == json.loads(json.dumps(b.head))
        assert a.columns.keys() == b.columns.keys()
        for name in a.columns:
            np.testing.assert_array_equal(a.columns[name], b.columns[name])


def test_frames_read_back_to_the_bit(tmp_path: Path) -> None:
    log = TokenLog(tmp_path)
    cut = log.write(4, 4, frames())
    assert cut == Cut(4, 4, len(BYTES))
    assert_equal(log.read(cut), frames())
    (entry,), after = read_pool(log, cut, {"toy": lambda prompt: None})  # type: ignore[dict-item,return-value]
    assert after == Place(1, 0)
    segments = entry.samples[0].segments
    assert [(s.weight_version, s.kv_version, len(s.token_ids)) for s in segments] == [(1, 0, 1), (2, 0, 2), (3, 0, 3)]
    assert [s.routed_experts.shape for s in segments if s.routed_experts is not None] == [(n, 2, 2) for n in (1, 2, 3)]


def test_what_is_behind_the_cut_is_dropped_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = TokenLog(tmp_path)
    cut = log.write(4, 4, frames())
    with log.file(4).open("ab") as out:
        out.write(b"torn")
    log.write(5, 4, frames())
    log.file(5).write_bytes(BYTES[:-3])
    assert_equal(log.read(cut), frames())
    said = capsys.readouterr().err.splitlines()
    assert f"{log.file(4)} has 4 bytes behind the end of step 4: they are dropped" in said[0]
    assert "step 5 is made again" in said[1]
    assert "4 frames, the last torn" in said[1]
    assert log.file(4).read_bytes() == BYTES
    assert not log.file(5).exists()


def test_a_file_that_was_cut_is_refused(tmp_path: Path) -> None:
    log = TokenLog(tmp_path)
    cut = log.write(4, 4, frames())
    os.truncate(log.file(4), len(BYTES) - 1)
    with pytest.raises(UserError, match=f"it has {len(BYTES) - 1} of {len(BYTES)} bytes"):
        log.read(cut)


def test_files_that_no_state_needs_are_deleted(tmp_path: Path) -> None:
    log = TokenLog(tmp_path)
    for step in range(4):
        log.write(step, 0, frames())
    log.drop_before(2)
    assert [f.name for f in sorted(tmp_path.iterdir())] == ["in_flight_00000002.log", "in_flight_00000003.log"]


def one_line(error: UserError) -> None:
    assert "\n" not in str(error)


def survives(data: bytes) -> None:
    """Frames that were written, or one line."""
    file = Path("log")
    try:
        pool_of(list(decode(data, file)), Cut(0, 0, len(data)), {"toy": lambda prompt: None}, file)  # type: ignore[dict-item,return-value]
    except UserError as error:
        one_line(error)


@settings(max_examples=FUZZ // 2, deadline=None)
@given(st.data())
def test_no_mutation_of_the_bytes_is_read_or_crashes(data: st.DataObject) -> None:
    raw = bytearray(BYTES)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "double", "insert"])):
            case "flip":
                raw[at] ^= 1 << data.draw(st.integers(0, 7))
            case "cut":
                del raw[at : at + data.draw(st.integers(1, 40))]
            case "double":
                raw[at:at] = raw[at : at + data.draw(st.integers(1, 400))]
            case _:
                raw[at:at] = data.draw(st.binary(max_size=20))
        if not raw:
            break
    if raw == BYTES:
        return
    ends = {0, *np.cumsum(SIZES).tolist()}
    try:
        found = list(decode(bytes(raw), Path("log")))
    except UserError as error:
        one_line(error)
    else:  # whole frames were taken away, or doubled
        assert sum(len(encode(f)) for f in found) == len(raw)
        assert len(raw) in ends or len(raw) > 0
    survives(bytes(raw))


def test_twenty_thousand_random_mutations_are_read_as_written_or_refused_in_one_line() -> None:
    """Plain chance, which costs less than hypothesis."""
    rng = random.Random(1)
    for _ in range(20_000):
        raw = bytearray(BYTES)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(max(1, len(raw)))
            raw[at : at + rng.choice((0, 1, 9, 90))] = rng.choice((b"", rng.randbytes(1), raw[at : at + 200]))
        survives(bytes(raw))


def sealed(head: bytes, columns: bytes) -> bytes:
    payload = struct.pack("<I", len(head)) + head + columns
    size = struct.pack("<I", len(payload))
    return size + struct.pack("<I", zlib.crc32(payload, zlib.crc32(size))) + payload


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = ["kind", "place", "sample", "segments", "names", "prompt", "state", "next", "prompts", "columns", "observed",
        "outcome", "finish_reason", "student_ids", "teacher_ids"]  # fmt: skip


@settings(max_examples=FUZZ // 2, deadline=None)
@given(st.data())
def test_frames_with_a_right_checksum_and_a_wrong_content_are_refused(data: st.DataObject) -> None:
    out = []
    for frame in frames():
        encoded = encode(frame)
        (length,) = struct.unpack_from("<I", encoded, 8)
        head, columns = json.loads(encoded[12 : 12 + length]), encoded[12 + length :]
        if data.draw(st.booleans()):
            head[data.draw(st.sampled_from(KEYS))] = data.draw(JSON)
        if data.draw(st.integers(0, 9)) == 0:
            columns = columns[: data.draw(st.integers(0, len(columns)))]
        text = json.dumps(head).encode() if data.draw(st.integers(0, 9)) else data.draw(st.binary(max_size=30))
        out.append(sealed(text, columns))
    survives(b"".join(out))
