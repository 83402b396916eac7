"""Routed experts from the rollout's segments to the learner's inputs: each input position has its own, each once.

The expert of a token is a function of its place in the trajectory here, so that a shift by one shows.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_mopd.batch import Batch
from megatron_mopd.config import Config
from megatron_mopd.errors import UserError
from megatron_mopd.mcore.options import check_router_replay, split_megatron_table
from megatron_mopd.mcore.packing import pack
from megatron_mopd.preflight import check_rollout
from megatron_mopd.protocols import KvUse, Observation, SampleRequest, ScoreRequest
from megatron_mopd.rollout.sampler import Sampling, sample
from megatron_mopd.store import TrajectoryStore
from megatron_mopd.types import Cell, Graded, Outcome, Prompt, RenderedPrompt, Segment, Trajectory

CELLS = (Cell("law", "low"),)
NUM_LAYERS, TOPK, PROMPT = 3, 2, (1, 2, 3)


def routes_of(start: int, end: int) -> np.ndarray:
    """Of positions [start, end): position p has experts p + 10 * layer, and 100 more."""
    position = np.arange(start, end)[:, None, None]
    layer, k = np.arange(NUM_LAYERS)[:, None], np.arange(TOPK)
    return (position + 10 * layer + 100 * k).astype(np.int16)


def sampled(start: int, end: int, tokens: int) -> Segment:
    ids = (5,) * tokens
    return Segment(ids, (-0.5,) * tokens, (True,) * tokens, 1, routed_experts=routes_of(start, end))


EMPTY = Segment((), (), (), 1, "abort")
INTERRUPTED = (
    sampled(0, 4, 2),  # prompt and first token
    EMPTY,
    sampled(4, 7, 3),
    Segment.observation((7, 8), 1),
    sampled(7, 10, 1),  # the last token before the observation, and the observation
    Segment.observation((9,), 1),
)


def trajectory(segments: tuple[Segment, ...], name: str = "t") -> Trajectory:
    return Trajectory(name, RenderedPrompt(Prompt("p", "law", "low", "e", ()), PROMPT, PROMPT), segments, "stop")


def graded(segments: tuple[Segment, ...], name: str = "t") -> Graded:
    t = trajectory(segments, name)
    return Graded(t, "teacher", -np.ones(len(t.response_ids), np.float32))


def test_the_routes_of_every_segment_are_joined() -> None:
    got = trajectory(INTERRUPTED).routed_experts
    assert got is not None
    np.testing.assert_array_equal(got, routes_of(0, 10), strict=True)


def test_a_segment_covers_what_the_one_before_it_could_not_record() -> None:
    """A request that is ended while it waits in the server has tokens and no routes."""
    lost = dataclasses.replace(sampled(0, 4, 2), routed_experts=None)
    got = trajectory((lost, sampled(0, 5, 1), lost)).routed_experts
    assert got is not None
    np.testing.assert_array_equal(got, routes_of(0, 5))


def test_a_trajectory_without_recorded_routes_has_none() -> None:
    bare = tuple(dataclasses.replace(s, routed_experts=None) for s in INTERRUPTED)
    assert trajectory(bare).routed_experts is None
    assert trajectory(()).routed_experts is None


@pytest.mark.parametrize(
    ("segments", "reason"),
    [
        ((sampled(0, 5, 2),), r"t has routed experts of 5 positions instead of 4: 0 to 4 of its 5 tokens"),
        ((sampled(0, 3, 2),), r"3 positions instead of 4"),
        ((sampled(0, 4, 2), sampled(0, 5, 1)), r"5 positions instead of 1: 4 to 5 of its 6"),
        ((dataclasses.replace(sampled(0, 4, 2), routed_experts=None), sampled(4, 5, 1)), r"1 positions instead of 5"),
        ((dataclasses.replace(EMPTY, routed_experts=routes_of(0, 2)), sampled(2, 4, 2)), r"2 positions instead of 0"),
    ],
    ids=["last token too", "one short", "again from the start", "one segment without", "of no token"],
)
def test_routes_of_other_positions_are_refused(segments: tuple[Segment, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        _ = trajectory(segments).routed_experts


@pytest.mark.parametrize("routes", [np.zeros((4, 6), np.int16), np.zeros((4, 3, 2), np.int32)])
def test_segment_rejects_routes_of_another_form(routes: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"routed experts must be int16 \[c, layers, top-k\], not"):
        Segment((5,), (-0.5,), (True,), 1, routed_experts=routes)


@pytest.fixture
def batch() -> Batch:
    """Rows of 12, 5, 3 and 4 tokens; the third has an empty response."""
    return Batch.from_graded(
        [graded(INTERRUPTED), graded((sampled(0, 4, 2),)), graded(()), graded((sampled(0, 3, 1),))], CELLS
    )


def test_a_row_has_the_routes_of_its_inputs_and_none_after_them(batch: Batch) -> None:
    assert batch.routed_experts is not None
    for row, covered in enumerate([10, 4, 0, 3]):
        start, end = batch.offsets[row : row + 2]
        np.testing.assert_array_equal(batch.routed_experts[start : start + covered], routes_of(0, covered))
        assert (batch.routed_experts[start + covered : end] == -1).all()


def test_selected_and_stored_rows_keep_their_routes(batch: Batch, tmp_path: Path) -> None:
    rows = [graded(INTERRUPTED), graded((sampled(0, 4, 2),)), graded(()), graded((sampled(0, 3, 1),))]
    store = TrajectoryStore(tmp_path)
    store.write(0, rows, CELLS, {})
    for chosen in ([], [3, 0], [2], range(4)):
        want = Batch.from_graded([rows[i] for i in chosen], CELLS).routed_experts
        for part in (batch.select(chosen), store.read(0).select(chosen)):
            got = part.routed_experts
            assert got is not None
            if want is not None:
                np.testing.assert_array_equal(got, want, strict=True)
            assert got.shape == (len(part.token_ids), NUM_LAYERS, TOPK)


def test_without_replay_nothing_is_stored(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    store.write(0, [graded((dataclasses.replace(sampled(0, 4, 2), routed_experts=None),))], CELLS, {})
    assert store.read(0).select([0]).routed_experts is None


def test_a_trajectory_that_alone_has_no_routes_is_refused() -> None:
    bare = dataclasses.replace(sampled(0, 4, 2), routed_experts=None)
    with pytest.raises(ValueError, match="other has no routed experts, and other trajectories have"):
        Batch.from_graded([graded((sampled(0, 4, 2),)), graded((bare,), "other")], CELLS)


def test_batch_rejects_routes_of_another_length(batch: Batch) -> None:
    with pytest.raises(ValueError, match="column routed_experts has 2 entries for 24 tokens"):
        dataclasses.replace(batch, routed_experts=routes_of(0, 2))


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_packed_input_has_the_routes_of_its_own_position(batch: Batch, tp: int, cp: int) -> None:
    covered = np.array([10, 4, 0, 3])
    for rank in range(cp):
        part = pack(batch, np.ones(4, np.float32), tp, cp, rank)
        assert part.routed_experts is not None
        row = np.searchsorted(batch.offsets, part.token, side="right") - 1
        for i, token in enumerate(part.token):
            position = token - 1 - batch.offsets[row[i]]
            real = token >= 0 and position < covered[row[i]]
            want = routes_of(position, position + 1)[0] if real else np.full((NUM_LAYERS, TOPK), -1)
            np.testing.assert_array_equal(part.routed_experts[i], want)
            assert token < 0 or part.position_ids[i] == position


def test_quarters_divide_the_trained_tokens_of_a_row() -> None:
    segments = (sampled(0, 8, 6), Segment.observation((7,) * 5, 1), sampled(8, 15, 2))
    batch = Batch.from_graded([graded(()), graded(segments), graded((sampled(0, 3, 1),))], CELLS)
    part = pack(batch, np.ones(3, np.float32), 1, 1, 0)
    assert (part.bucket[part.loss_mask] // 5).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 0]
    assert (part.bucket[~part.loss_mask] == 0).all()


class Recording:
    """An engine that records routes, and gives up every second time."""

    weight_version = 1

    def __init__(self) -> None:
        self.kv = KvUse()
        self.asked: list[int] = []

    async def start(self) -> None: ...

    async def generate(self, request: SampleRequest) -> Segment:
        self.asked.append(request.routed_positions)
        if len(self.asked) == 2:
            return dataclasses.replace(EMPTY, finish_reason="stop")
        routes = routes_of(request.routed_positions, len(request.token_ids) + 2 - 1)
        return Segment((5, 6), (-0.5, -0.5), (True, True), 1, "stop", routes)

    async def interrupt(self) -> None: ...

    async def update_weights(self, folder: Path | None, weight_version: int) -> None: ...

    async def close(self) -> None: ...


class Tool:
    stop_token_ids: tuple[int, ...] = (6,)

    def __init__(self, _: Prompt) -> None:
        self.steps = 0

    async def step(self, token_ids: tuple[int, ...]) -> Observation:
        self.steps += 1
        return Observation((7, 8) if token_ids else (), done=self.steps == 4)

    async def score(self, trajectory: Trajectory) -> Outcome:
        return Outcome(1.0, 1)


def test_the_sampler_asks_for_the_positions_that_no_segment_has() -> None:
    engine = Recording()
    prompt = RenderedPrompt(Prompt("p", "law", "low", "e", ()), PROMPT, PROMPT)

    async def one() -> Trajectory:
        (t,) = [t async for t in sample([prompt], Sampling(engine, {"e": Tool}, 50, 99, 100), "@0")]
        return t

    t = asyncio.run(one())
    assert engine.asked == [0, 4, 4, 8]
    assert t.routed_experts is not None
    np.testing.assert_array_equal(t.routed_experts, routes_of(0, 12))
    assert len(PROMPT) + len(t.response_ids) == 15, "the tail observation has no routes"


HF_CONFIG = {
    "model_type": "qwen3_moe",
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "hidden_size", "num_attention_heads"), 8),
    **dict.fromkeys(("num_key_value_heads", "intermediate_size", "moe_intermediate_size", "num_hidden_layers"), 8),
    **{"hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "use_sliding_window": False},
    **{"attention_dropout": 0.0, "rms_norm_eps": 1e-6, "num_experts": 8, "num_experts_per_tok": 2},
    **{"norm_topk_prob": True, "rope_theta": 1e4},
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("moe_router_fusion", True),
        ("moe_router_load_balancing_type", "sinkhorn"),
        ("cuda_graph_impl", "local"),
        ("enable_cuda_graph", True),
    ],
)
def test_routers_that_would_not_ask_are_refused(key: str, value: object) -> None:
    with pytest.raises(UserError, match=rf"megatron\.{key}=.* chooses experts without rollout\.router_replay"):
        check_router_replay(split_megatron_table({key: value}), HF_CONFIG)
    check_router_replay(split_megatron_table({"cuda_graph_impl": "none", "moe_aux_loss_coeff": 0.1}), HF_CONFIG)


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(UserError, match="the student has no experts"):
        check_router_replay(split_megatron_table({}), {**HF_CONFIG, "num_experts": 0})


def test_megatrons_own_switch_is_ours() -> None:
    with pytest.raises(UserError, match=r"moe_enable_routing_replay cannot be set: it follows from rollout\.router_r"):
        split_megatron_table({"moe_enable_routing_replay": True})


@pytest.fixture
def make_config() -> Callable[..., Config]:
    def make(**rollout: object) -> Config:
        return Config.model_validate(
            {
                "run": {"folder": "unused", "num_steps": 1},
                "student": {"checkpoint": "unused"},
                "prompts": {"files": [], "batch_size": 1, "mixture": {"law": 1}},
                "environments": {},
                "rollout": {"max_response_tokens": 1, **rollout},
            }
        )

    return make


def test_an_engine_that_records_nothing_is_refused(make_config: Callable[..., Config]) -> None:
    table = split_megatron_table({})
    with pytest.raises(UserError, match=r"the embedded engine records no routes; set rollout\.engine=sglang"):
        check_rollout(make_config(router_replay=True), table, HF_CONFIG)
    check_rollout(make_config(), table, HF_CONFIG)


def test_a_teacher_is_told_tokens_and_no_routes() -> None:
    """NeMo #4083: a teacher that replays the student's routes scores another model."""
    assert [f.name for f in dataclasses.fields(ScoreRequest)] == ["trajectory_id", "prompt_ids", "response_ids"]
