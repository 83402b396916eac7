"""Laws of the verifiers: they accept what is right and nothing else, never raise for an answer, and say which prompt
and verifier are at fault when they cannot judge."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from examples.quickstart.world import write_tokenizer
from megatron_mopd.errors import UserError
from megatron_mopd.protocols import Verifier
from megatron_mopd.rollout.environments import load_factory
from megatron_mopd.types import Prompt, RenderedPrompt, Segment, Trajectory
from megatron_mopd.verifiers.answer import AnswerMatch, read_number
from megatron_mopd.verifiers.environment import VerifiedTurn
from megatron_mopd.verifiers.load import check, judge, load_verifier
from megatron_mopd.verifiers.state import StateCheck
from megatron_mopd.verifiers.unit_tests import UnitTests, program_of

LABELS: dict[str, Any] = {"answer_match": "4", "unit_tests": [["2", "4"]], "state_check": {"a": 1}}
HOSTILE = ["", "\x00", "1/0", "1e999999999", "9" * 100_000, "```\n```", "\ud800", "raise SystemExit(0)", "{}"]


def make_prompt(label: Any) -> Prompt:
    return Prompt("p7", "d", "low", "e", (), label)


def reward(verifier: Verifier, label: Any, answer: Any) -> float:
    return asyncio.run(judge("v", verifier, make_prompt(label), answer))


@pytest.mark.parametrize("name", LABELS)
def test_a_prompt_without_its_label_is_named(name: str) -> None:
    verifier = load_verifier(name, {})
    check(name, verifier, make_prompt(LABELS[name]))
    for missing in (None, [], {}, "", True):
        with pytest.raises(UserError, match=f"prompt p7 cannot be judged by verifier '{name}': it has no label"):
            check(name, verifier, make_prompt(missing))


@pytest.mark.parametrize("name", ["answer_match", "unit_tests"])
@pytest.mark.parametrize("answer", HOSTILE)
def test_no_answer_makes_a_verifier_raise(name: str, answer: str) -> None:
    assert reward(load_verifier(name, {}), LABELS[name], answer) == 0.0


@pytest.mark.parametrize("state", [None, 3, "text", [], {"a": None}, {"b": 1}, {"a": True}])
def test_no_state_makes_a_check_raise(state: Any) -> None:
    assert reward(StateCheck(), {"a": 1, "a.b.0": None}, state) == 0.0


@pytest.mark.parametrize(
    ("options", "label", "answer", "is_correct"),
    [
        ({}, "new  York", " new York\n", True),
        ({}, "New York", "new york", False),
        ({}, ["a", "b"], "b", True),
        ({"pattern": r"\\boxed\{([^}]*)\}"}, "4", r"first \boxed{3}, no: \boxed{4}", True),
        ({"pattern": r"\\boxed\{([^}]*)\}"}, "4", "4", False),
        ({"compare": "number"}, 0.5, "1/2", True),
        ({"compare": "number"}, "1,250", "$1250.00", True),
        ({"compare": "number"}, "1250", "1250.01", False),
        ({"compare": "number"}, "1250", "about 1250", False),
    ],
)
def test_answers_are_matched(options: dict[str, Any], label: Any, answer: str, is_correct: bool) -> None:
    assert reward(AnswerMatch(**options), label, answer) == is_correct


def test_numbers_are_read_without_being_evaluated() -> None:
    assert read_number("-3/4") == read_number("-0.75")
    assert [read_number(text) for text in ("2**9", "1e9999", "nan", "inf", "0x10", "1/0")] == [None] * 6


def test_a_program_passes_only_if_it_passes_every_test() -> None:
    tests = [["2", "4"], ["5", "25"]]
    assert reward(UnitTests(), tests, "Here:\n```python\nprint(int(input()) ** 2)\n```\nDone.") == 1.0
    assert reward(UnitTests(), tests, "print(int(input()) + 2)") == 0.0
    assert reward(UnitTests(), tests, "print(4); print(25)") == 0.0
    assert reward(UnitTests(), tests, "print(int(input()) ** 2)\nraise SystemExit(1)") == 0.0


def test_the_last_program_of_an_answer_counts() -> None:
    assert program_of("```\na\n``` or rather\n```python\nb\n```") == "b\n"
    assert program_of("c") == "c"


def test_states_are_compared_where_the_label_says() -> None:
    state = {"orders": [{"status": "cancelled"}], "paid": False, "note": "anything"}
    assert reward(StateCheck(), {"orders.0.status": "cancelled", "paid": False, "cart": None}, state) == 1.0
    assert reward(StateCheck(), {"orders.0.status": "open"}, state) == 0.0
    assert reward(StateCheck(), {"orders.1.status": "cancelled"}, state) == 0.0
    assert reward(StateCheck(), {"paid": 0}, state) == 0.0


class Lazy:
    """Checks nothing, and cannot verify."""

    def check(self, prompt: Prompt) -> None: ...


class Careless:
    """Raises what comes from its own mistakes, wherever it is asked."""

    def __init__(self, *, ready: bool = True) -> None:
        if not ready:
            raise RuntimeError("no sandbox")

    def check(self, prompt: Prompt) -> None:
        prompt.label["answer"]

    async def verify(self, prompt: Prompt, answer: Any) -> float:
        return 1.0


class Broken:
    """A user's verifier that raises, or answers with what its option says."""

    def __init__(self, *, reward: Any = None) -> None:
        self.reward = reward

    def check(self, prompt: Prompt) -> None: ...

    async def verify(self, prompt: Prompt, answer: Any) -> Any:
        return 1 / 0 if self.reward is None else self.reward


def test_a_verifier_that_raises_is_named_with_the_prompt() -> None:
    broken = load_verifier(f"{__name__}:Broken", {})
    with pytest.raises(UserError, match=r"'mine' failed on prompt p7: ZeroDivisionError: division by zero"):
        asyncio.run(judge("mine", broken, make_prompt(1), ""))


def test_a_check_that_raises_is_named_with_the_prompt() -> None:
    careless = load_verifier(f"{__name__}:Careless", {})
    with pytest.raises(UserError, match=r"prompt p7 cannot be judged by verifier 'mine': TypeError: "):
        check("mine", careless, make_prompt(1))


@pytest.mark.parametrize("value", [1, 0.5, np.float32(0.5), np.int64(1)])
def test_a_reward_may_be_a_number_of_any_kind(value: Any) -> None:
    reward = asyncio.run(judge("mine", Broken(reward=value), make_prompt(1), ""))
    assert type(reward) is float
    assert reward == value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", True, np.float32("nan"), np.bool_(True)])
def test_a_reward_that_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(UserError, match=r"gave prompt p7 the reward .*, not a finite number"):
        asyncio.run(judge("mine", Broken(reward=value), make_prompt(1), ""))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("anser_match", {}, "no verifier 'anser_match'; name one of answer_match"),
        ("no.such.module:X", {}, "cannot be imported: No module named 'no'"),
        ("examples.no_such:X", {}, "cannot be imported: No module named 'examples.no_such'"),
        (3, {}, "verifier: 3 is no name; name one of answer_match"),
        ("answer_match", {"colour": 1}, "'answer_match' does not take its options"),
        ("answer_match", {"pattern": ...}, "'answer_match' does not take its options: .* is not JSON serializable"),
        (f"{__name__}:Lazy", {}, "needs the methods check and verify"),
        (f"{__name__}:Careless", {"ready": False}, "cannot be made: RuntimeError: no sandbox"),
        ("answer_match", {"pattern": "("}, "is no regular expression"),
        ("answer_match", {"pattern": "a"}, "needs one group"),
        ("answer_match", {"compare": "vibes"}, "must be one of text, number"),
        ("unit_tests", {"sandbox": {"cpus": 1}}, "unit_tests: sandbox: .*cpus"),
    ],
)
def test_a_verifier_that_cannot_be_made_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_verifier(name, options)


@pytest.mark.parametrize("load", [lambda path: load_verifier(path, {}), lambda path: load_factory("mine", path)])
def test_a_module_that_raises_is_refused(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_that_raises.py").write_text("raise RuntimeError('no licence')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"'module_that_raises:X' cannot be imported: RuntimeError: no licence"):
        load("module_that_raises:X")


def test_a_turn_is_judged_on_what_follows_its_thinking(tmp_path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    prompt = make_prompt("4")
    environment = VerifiedTurn(prompt, tokenizer, verifier="answer_match", end_of_thinking="<answer>")
    ids = tuple(tokenizer.convert_tokens_to_ids(["A", "3", "<answer>", "4", "<eos>"]))
    segment = Segment(ids, (0.0,) * 5, (True,) * 5, 0)
    outcome = asyncio.run(environment.score(Trajectory("t", RenderedPrompt(prompt, (), ()), (segment,), "stop")))
    assert (outcome.reward, outcome.spent_tokens) == (1.0, 3)
    with pytest.raises(UserError, match="prompt p7 cannot be judged"):
        VerifiedTurn(make_prompt(None), tokenizer, verifier="answer_match")
    with pytest.raises(UserError, match="no token of the student's vocabulary"):
        VerifiedTurn(prompt, tokenizer, verifier="answer_match", end_of_thinking="</think>")
