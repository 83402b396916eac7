"""Laws of task synthesis: answers follow from what is shown, difficulties are met exactly, no set has a task of
another, and everything follows from the seed."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mopd.errors import UserError
from megatron_mopd.prompts.files import read_prompts
from megatron_mopd.synthesis.contamination import HeldOut
from megatron_mopd.synthesis.difficulty import counts, informative_weights
from megatron_mopd.synthesis.graph import Fact, KnowledgeGraph, random_graph
from megatron_mopd.synthesis.graph_tasks import GraphQuestions
from megatron_mopd.synthesis.splits import Decontamination, Split, write_splits
from megatron_mopd.synthesis.task import Task
from megatron_mopd.verifiers.load import check, load_verifier

GRAPH = random_graph(Random(0), num_entities=40, relations=("mentor", "rival", "heir"))
QUESTIONS = GraphQuestions(GRAPH, domain="general", environment="graph")
SPLITS = [Split("eval", 20, {1: 1, 2: 2, 3: 1}), Split("tuning", 8, {2: 1}), Split("train", 60, {1: 1, 2: 1, 4: 1})]


class Sums:
    """Few tasks at difficulty 1, so that splits compete for them."""

    domain, environment = "sums", "sums"

    @property
    def difficulties(self) -> tuple[int, ...]:
        return (1, 2)

    def draw(self, difficulty: int, rng: Random) -> Task:
        numbers = [rng.randrange(10) for _ in range(difficulty + 1)]
        content = " + ".join(map(str, numbers))
        return Task(({"role": "user", "content": content},), str(sum(numbers)), difficulty, budget_tokens=3.0)


def text_task(text: str) -> Task:
    return Task(({"role": "user", "content": text},), "x", 1)


@pytest.mark.parametrize("hops", [1, 2, 3, 4])
def test_a_graph_question_has_the_one_answer_that_its_facts_give(hops: int) -> None:
    rng = Random(hops)
    verifier = load_verifier("answer_match", {})
    for prompt in (QUESTIONS.draw(hops, rng) for _ in range(100)):
        shown = KnowledgeGraph(Fact(*fact) for fact in prompt.metadata["facts"])
        relations = prompt.metadata["relations"]
        assert len(relations) == prompt.difficulty == hops
        assert shown.follow(prompt.metadata["start"], relations) == prompt.label
        assert all(f"the {r} of {s} is {o}." in prompt.messages[0]["content"] for s, r, o in shown.facts)
        check("answer_match", verifier, prompt)  # type: ignore[arg-type]  # it has a label, as a Prompt
        assert asyncio.run(verifier.verify(prompt, prompt.label)) == 1.0  # type: ignore[arg-type]


def test_an_ambiguous_step_is_never_taken() -> None:
    graph = KnowledgeGraph(
        [Fact("a", "knows", "b"), Fact("a", "knows", "c"), Fact("a", "owns", "d"), Fact("d", "is", "e")]
    )
    assert {graph.walk(1, Random(i)).relations for i in range(50)} == {("owns",), ("is",)}
    assert graph.follow("a", ["knows"]) is None
    assert graph.follow("a", ["owns", "is"]) == "e"


def test_a_walk_visits_nothing_twice() -> None:
    for seed in range(100):
        walk = GRAPH.walk(4, Random(seed))
        assert len({walk.start, *(fact.object for fact in walk.facts)}) == 5


def test_a_walk_that_the_graph_does_not_have_is_refused() -> None:
    ring = KnowledgeGraph([Fact("a", "next", "b"), Fact("b", "next", "a")])
    with pytest.raises(UserError, match="2 facts has no walk of 2 unambiguous hops"):
        ring.walk(2, Random(0))


@given(st.dictionaries(st.integers(1, 9), st.floats(0.01, 10), min_size=1), st.integers(0, 500))
def test_difficulties_are_apportioned_exactly(weights: dict[int, float], num_tasks: int) -> None:
    apportioned = counts(weights, num_tasks)
    assert sum(apportioned.values()) == num_tasks
    total = sum(weights.values())
    assert all(abs(n - num_tasks * weights[level] / total) < 1 for level, n in apportioned.items())


def test_difficulties_that_teach_most_weigh_most() -> None:
    weights = informative_weights({1: 1.0, 2: 0.9, 3: 0.5, 4: 0.0})
    assert weights[3] == max(weights.values()) == 0.25
    assert weights[1] == weights[4] == 0.02
    with pytest.raises(UserError, match="between 0 and 1"):
        informative_weights({1: 1.2})


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("A b  C d e f", 1.0),  # the same, but for case and white space
        ("a b c d x y", 1 / 3),
        ("x a b c d e y", 0.5),
        ("a c b d e f", 0.0),
        ("q r s", 1.0),  # shorter than an n-gram, and held out whole
        ("q r", 0.0),
    ],
)
def test_overlap_is_the_share_of_n_grams_that_are_held_out(text: str, share: float) -> None:
    held_out = HeldOut(ngram_words=4)
    held_out.add([text_task("a b c d e f"), text_task("q r s")])
    assert held_out.share(text_task(text)) == pytest.approx(share)
    assert held_out.is_contaminated(text_task(text)) == (share >= 0.5)


def test_splits_share_no_task_and_meet_their_difficulties(tmp_path: Path) -> None:
    written = write_splits(tmp_path, [QUESTIONS], SPLITS, seed=1)
    texts = {name: {task.text for task in tasks} for name, tasks in written.items()}
    assert [len(t) for t in texts.values()] == [20, 8, 60]
    assert len(set.union(*texts.values())) == 88
    assert Counter(t.difficulty for t in written["eval_general"]) == {1: 5, 2: 10, 3: 5}
    assert Counter(t.difficulty for t in written["train_general"]) == {1: 20, 2: 20, 4: 20}


def test_a_question_of_one_split_is_in_no_other_whatever_facts_stand_round_it(tmp_path: Path) -> None:
    """Of these names each split would ask a third again, among facts in another order, and the answer is the same."""
    names = random_graph(Random(1), num_entities=12, relations=("mentor", "rival", "heir"))
    generator = GraphQuestions(names, domain="general", environment="graph")
    splits = [Split("eval", 40, {1: 1, 2: 1}), Split("train", 80, {1: 1, 2: 1})]
    asked = [
        {(t.metadata["start"], *t.metadata["relations"]) for t in tasks}
        for tasks in write_splits(tmp_path, [generator], splits, seed=0).values()
    ]
    assert asked[0].isdisjoint(asked[1])


def test_decontamination_goes_by_n_grams_too(tmp_path: Path) -> None:
    rule = Decontamination(ngram_words=3, max_share=0.3)  # neither "a + b" nor "b + c" of "a + b + c"
    splits = [Split("eval", 30, {1: 1}), Split("train", 30, {2: 1})]
    written = write_splits(tmp_path, [Sums()], splits, seed=0, rule=rule)
    asked = {task.text for task in written["eval_sums"]}
    for task in written["train_sums"]:
        words = task.text.split()
        assert not {" ".join(words[0:3]), " ".join(words[2:5])} & asked


def test_the_same_seed_writes_the_same_bytes_whatever_else_is_written(tmp_path: Path) -> None:
    write_splits(tmp_path / "a", [QUESTIONS, Sums()], SPLITS[1:2], seed=1)
    write_splits(tmp_path / "b", [Sums()], SPLITS[1:2], seed=1)
    write_splits(tmp_path / "c", [Sums()], SPLITS[1:2], seed=2)
    one, other, third = ((tmp_path / x / "tuning_sums.jsonl").read_bytes() for x in "abc")
    assert one == other != third


def test_written_files_are_prompt_files(tmp_path: Path) -> None:
    write_splits(tmp_path, [QUESTIONS, Sums()], SPLITS[1:2], seed=1)
    prompts = read_prompts(sorted(tmp_path.glob("*.jsonl")))
    assert Counter((p.domain, p.environment, p.budget_tokens) for p in prompts) == {
        ("general", "graph", None): 8,
        ("sums", "sums", 3.0): 8,
    }
    assert all(p.metadata["difficulty"] == 2 and p.label for p in prompts)
    assert json.loads((tmp_path / "tuning_sums.jsonl").read_text().splitlines()[0])["id"] == "tuning_sums-0"


def test_a_generator_with_too_few_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="split train: sums has too few different tasks of difficulty 1"):
        write_splits(tmp_path, [Sums()], [Split("eval", 60, {1: 1}), Split("train", 60, {1: 1})], seed=0)
    with pytest.raises(UserError, match="split eval: sums has no difficulty 7; it has 1, 2"):
        write_splits(tmp_path, [Sums()], [Split("eval", 1, {7: 1})], seed=0)
