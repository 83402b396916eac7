"""The trajectory store: what is written is what every rank reads, whatever rows it asks for."""

import numpy as np
import pytest

from megatron_mopd.batch import TOKEN_COLUMNS, Batch
from megatron_mopd.errors import UserError
from megatron_mopd.rollout.token_log import Cut
from megatron_mopd.store import TrajectoryStore
from megatron_mopd.types import Cell, Graded, Outcome, Prompt, RenderedPrompt, Segment, Trajectory

CELLS = (Cell("general", "low"), Cell("coding", "max"))


def graded(k, cell):
    rng = np.random.default_rng(k)
    prompt = RenderedPrompt(Prompt(f"p{k}", cell.domain, cell.effort, "e", ()), tuple(rng.integers(0, 9, 3)), (1,))
    n = int(rng.integers(0, 6))
    sampled = Segment(tuple(rng.integers(0, 9, n)), tuple(-rng.random(n)), (True,) * n, weight_version=k)
    segments = (sampled, Segment.observation((7, 8), k))
    t = Trajectory(f"t{k}", prompt, segments, "stop", Outcome(1.0, n, 4))
    hidden = rng.integers(0, 1 << 16, (n + 2, 5)).astype(np.uint16)
    return Graded(t, "teacher", -rng.random(n + 2).astype(np.float32), hidden)


@pytest.fixture
def written(tmp_path):
    rows = [graded(k, CELLS[k % 2]) for k in range(9)]
    store = TrajectoryStore(tmp_path)
    advantage = np.linspace(-1, 1, 9, dtype=np.float32)
    store.write(4, rows, CELLS, {"cells": {}}, outcome_advantage=advantage)
    return store, Batch.from_graded(rows, CELLS, advantage)


@pytest.mark.parametrize("rows", [[], [0], [8, 2, 5], list(range(9))])
def test_any_rows_read_back_equal_the_batch_in_memory(written, rows):
    store, batch = written
    stored = store.read(4)
    assert len(stored) == len(batch)
    assert stored.cells == batch.cells
    np.testing.assert_array_equal(stored.lengths, batch.lengths)
    np.testing.assert_array_equal(stored.loss_tokens, batch.loss_tokens)
    np.testing.assert_array_equal(stored.advantage_sums, batch.advantage_sums)
    got, want = stored.select(rows), batch.select(rows)
    assert stored.select(rows, []).teacher_hidden is None
    for name in (*TOKEN_COLUMNS, "offsets", "cell", "teacher_hidden", "outcome_advantage"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
        assert getattr(got, name).dtype == getattr(want, name).dtype


def test_a_step_is_there_whole_or_not_at_all(written, tmp_path):
    store, _ = written
    (tmp_path / "trajectories" / "step_00000005.partial").mkdir()
    assert store.has(4)
    assert not store.has(5)


def test_demonstrations_are_a_step_without_a_rollout(written):
    store, batch = written
    store.write_demonstrations(7, batch, [{"id": "d"}] * len(batch))
    assert store.has(7)
    assert len(store.read(7)) == len(batch)
    assert (store.rollout(4), store.rollout(7)) == ({"cells": {}}, None)
    assert (store.folder(7) / "rows.jsonl").read_text() == '{"id": "d"}\n' * len(batch)


def test_cut_forgets_a_step_and_all_after_it(written):
    store, _ = written
    store.write(3, [graded(1, CELLS[0])], CELLS, {"cells": {}})
    store.cut(4)
    assert store.has(3)
    assert not store.has(4)
    assert not list(store.folder(4).parent.glob("*.partial"))


def test_a_step_says_where_the_token_log_has_what_it_left_in_flight(written, tmp_path):
    """Also one that its lanes could not finish; and what no checkpoint needs is not."""
    store, _ = written
    assert store.pool_after(4) is None
    store.write(5, [graded(1, CELLS[0])], CELLS, {"cells": {}}, pool=Cut(2, 5, 70))
    store.keep(6, [], Cut(3, 6, 80))
    assert (store.pool_after(5), store.pool_after(6)) == (Cut(2, 5, 70), Cut(3, 6, 80))
    assert store.first_needed(6) == 3
    (tmp_path / "checkpoints" / "step_00000006").mkdir(parents=True)
    assert store.first_needed(6) == 2, "from the checkpoint of step 6 it is step 5 that is continued"
    store.cut(6)
    assert store.pool_after(6) == Cut(3, 6, 80)
    store.write(6, [graded(1, CELLS[0])], CELLS, {"cells": {}})
    assert store.pool_after(6) is None
    store.cut(5)
    assert store.pool_after(5) is None


@pytest.mark.parametrize("text", ["", "[1, 2]", "[3, 2, 9]", '["a", 2, 3]', "{}", "[1, 2, -3]"])
def test_a_place_in_the_token_log_that_is_none_is_one_line(written, text):
    store, _ = written
    (store.folder(4) / "pool.json").write_text(text)
    with pytest.raises(UserError, match=r"pool.json does not say where the token log has what is in flight"):
        store.pool_after(4)
