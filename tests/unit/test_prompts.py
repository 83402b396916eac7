"""DRAW: prompt files and the mixture."""

import json
from collections import Counter

import pytest

from megatron_mopd.config import Config, Environment, Prompts, Rollout, Run, Student
from megatron_mopd.errors import UserError
from megatron_mopd.preflight import check_environments_of, check_held_out
from megatron_mopd.prompts.files import read_prompts
from megatron_mopd.prompts.source import PromptSource
from megatron_mopd.types import Cell, Prompt

LINE = {"id": "a", "domain": "general", "environment": "sums", "messages": [{"role": "user", "content": "1 + 1"}]}


def write(tmp_path, *lines):
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return file


def pool(**sizes):
    return [
        Prompt(f"{domain}-{i}", domain, "", "sums", ({"role": "user", "content": str(i)},))
        for domain, size in sizes.items()
        for i in range(size)
    ]


def config(**changes):
    return Prompts(**{"files": (), "batch_size": 36, "mixture": {"general": 2.0, "coding": 1.0}, **changes})


def test_a_line_becomes_a_prompt(tmp_path):
    line = {**LINE, "label": "2", "metadata": {"n": 1}, "budget_tokens": 12}
    (prompt,) = read_prompts([write(tmp_path, line)])
    assert (prompt.id, prompt.domain, prompt.label, prompt.metadata["n"]) == ("a", "general", "2", 1)
    assert prompt.budget_tokens == 12.0


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({**LINE, "domain": None}, "no 'domain'"),
        ({k: v for k, v in LINE.items() if k != "domain"}, "no 'domain'"),
        ({**LINE, "domain": 3}, "'domain' must be a string"),
        ({**LINE, "messages": "hello"}, "'messages' must be a list"),
        ({**LINE, "messages": [{"role": "user"}]}, "'messages' must be a list"),
        ({**LINE, "answer": 4}, "unknown key 'answer'"),
        ({**LINE}, "prompt id 'a' was already used at"),
        ("{", "not a JSON object"),
        ("[1]", "not a JSON object but a list"),
        ({**LINE, "effort": 5}, "'effort' must be a string, not 5"),
        ({**LINE, "metadata": [1]}, "'metadata' must be an object"),
        ({**LINE, "budget_tokens": 0}, "'budget_tokens' must be a number above 0, not 0"),
        ({**LINE, "budget_tokens": 10**400}, "'budget_tokens' must be a number above 0, not 1000"),
        ({**LINE, "budget_tokens": True}, "'budget_tokens' must be a number above 0, not True"),
        ({**LINE, "budget_tokens": "12"}, "'budget_tokens' must be a number above 0, not '12'"),
        ('{"label": NaN}', "NaN is no JSON number"),
        ('{"id": "\\ud800"}', "surrogates not allowed"),
        ("[" * 100_000, "not a JSON object: maximum recursion depth"),
        ("1" * 5000, "not a JSON object: Exceeds the limit"),
    ],
)
def test_a_bad_line_is_refused_with_its_file_and_number(tmp_path, line, reason):
    file = write(tmp_path, LINE, "", line)
    with pytest.raises(UserError, match=reason) as error:
        read_prompts([file])
    assert f"{file}:3" in str(error.value)
    assert "\n" not in str(error.value)


def test_other_encodings_are_refused_and_a_byte_order_mark_and_crlf_read(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(LINE).encode() + b"\r\n\r\n")
    assert [prompt.id for prompt in read_prompts([file])] == ["a"]
    file.write_bytes(json.dumps({**LINE, "id": "\xe9"}, ensure_ascii=False).encode("latin-1"))
    with pytest.raises(UserError, match=r"prompts.jsonl:1: not a JSON object: 'utf-8' codec"):
        read_prompts([file])


def test_shares_of_the_mixture_hold_in_every_step_up_to_rounding():
    source = PromptSource(pool(general=50, coding=50), config(batch_size=20), seed=0)
    totals = Counter()
    for step in range(60):
        counts = Counter(p.cell for p in source.draw(step))
        assert sum(counts.values()) == 20
        assert all(
            abs(counts[c] - 20 * w / 9) < 1 for c, w in [(Cell("general", "low"), 2), (Cell("coding", "max"), 1)]
        )
        totals.update(counts)
    assert totals[Cell("general", "high")] == pytest.approx(60 * 20 * 2 / 9, abs=6)


def test_a_step_draws_the_same_prompts_whatever_ran_before():
    prompts = pool(general=7, coding=11)
    one, other = PromptSource(prompts, config(), seed=3), PromptSource(prompts, config(), seed=3)
    steps = [one.draw(step) for step in range(6)]
    assert other.draw(5) == steps[5]
    assert other.draw(2) == steps[2]
    assert PromptSource(prompts, config(), seed=4).draw(5) != steps[5]


def test_every_prompt_of_a_cell_is_drawn_once_before_any_is_drawn_again():
    source = PromptSource(
        pool(general=12), config(mixture={"general": 1.0}, efforts={"low": 1.0}, batch_size=5), seed=0
    )
    drawn = [p.id for step in range(12) for p in source.draw(step)]
    for epoch in range(5):
        assert len(set(drawn[12 * epoch : 12 * epoch + 12])) == 12
    assert drawn[:12] != drawn[12:24]


def test_a_prompt_with_an_effort_is_drawn_only_at_this_effort():
    low = Prompt("x", "general", "low", "sums", ())
    open_ = Prompt("y", "general", "", "sums", ())
    source = PromptSource([low, open_], config(mixture={"general": 1.0}), seed=0)
    drawn = Counter((p.id, p.effort) for step in range(4) for p in source.draw(step))
    assert {effort for (id_, effort) in drawn if id_ == "x"} == {"low"}
    assert {effort for (id_, effort) in drawn if id_ == "y"} == {"low", "high", "max"}


def test_an_evaluated_task_that_is_trained_on_is_refused_whatever_it_is_called():
    """Budgets are measured of a task, and efforts drawn for it; another table behind the same words is another task."""
    words = ({"role": "user", "content": "look up"},)
    trained = Prompt("t", "law", "", "qa", words, "2", {"table": [1]})
    same = Prompt("e", "law", "low", "qa", words, "2", {"table": [1], "budget": {"samples": 4}}, budget_tokens=3.0)
    check_held_out([trained], [Prompt("t", "law", "", "qa", words, "2", {"table": [2]})])
    with pytest.raises(UserError, match=r"^prompt e of prompts\.eval_files is prompt t of prompts\.files; evaluate on"):
        check_held_out([trained], [same])


class Picky:
    """An environment that checks prompts, and does so badly."""

    def __init__(self, prompt, tokenizer): ...

    @classmethod
    def check_prompt(cls, prompt):
        prompt.metadata["table"]


def test_a_check_of_prompts_that_raises_is_named_with_the_prompt(tmp_path):
    picky = Config(
        run=Run(folder=tmp_path, num_steps=1),
        student=Student(checkpoint=tmp_path),
        prompts=config(),
        rollout=Rollout(max_response_tokens=1),
        environments={"picky": Environment(factory=f"{__name__}:Picky")},
    )
    with pytest.raises(UserError, match=r"^environment 'picky' cannot check prompt p: KeyError: 'table'$"):
        check_environments_of([Prompt("p", "law", "", "picky", ())], picky)


def test_a_cell_without_prompts_is_refused():
    with pytest.raises(UserError, match="no prompt for coding/low"):
        PromptSource(pool(general=3), config(), seed=0)
