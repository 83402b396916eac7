"""Laws of the quickstart world: its files follow from the seed, its verifiers accept what is right and nothing else,
and the effort changes one token of a prompt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.quickstart import environments, world
from examples.quickstart.tasks import ANSWER, CALL, DOMAINS, EOS, ERROR, NEUTRAL, TASKS, VOCABULARY, run_program
from megatron_mopd.config import load_config
from megatron_mopd.prompts.files import read_prompts
from megatron_mopd.rollout.budget import budget_tokens, final_taus
from megatron_mopd.store import StoredBatch
from megatron_mopd.types import Outcome, Prompt, RenderedPrompt, Segment, Trajectory

CONFIG = load_config(["examples/quickstart/mopd.yaml"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    world.write_world(folder, seed=3)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path):
    return AutoTokenizer.from_pretrained(folder / "base")


def make_prompt(domain: str, effort: str = "max", label: object = None, **metadata: object) -> Prompt:
    environment, budget = world.ENVIRONMENTS[domain], world.BUDGET_TOKENS[domain]
    return Prompt("p", domain, effort, environment, (), label, metadata, budget)


def make_environment(prompt: Prompt, tokenizer) -> environments.Thinking:
    """The class and the options that the YAML file names."""
    entry = CONFIG.environments[prompt.environment]
    factory = getattr(environments, entry.factory.removeprefix("examples.quickstart.environments:"))
    return factory(prompt, tokenizer, **entry.options)


def judge(prompt: Prompt, tokenizer, words: Sequence[str], sampled: Sequence[bool] | None = None) -> Outcome:
    ids = tuple(map(VOCABULARY.index, words))
    segment = Segment(ids, (0.0,) * len(ids), tuple(sampled or [True] * len(ids)), 0)
    trajectory = Trajectory("t", RenderedPrompt(prompt, (), ()), (segment,), "stop")
    outcome = asyncio.run(make_environment(prompt, tokenizer).score(trajectory))
    return replace(outcome, budget_tokens=budget_tokens(prompt, final_taus(CONFIG)))


def test_same_seed_writes_the_same_bytes(folder: Path, tmp_path: Path):
    world.write_world(tmp_path, seed=3)
    files = sorted(file.relative_to(folder) for file in folder.rglob("*") if file.is_file())
    assert len(files) == 6 + 5 + 10
    assert all((folder / file).read_bytes() == (tmp_path / file).read_bytes() for file in files)


def test_another_seed_writes_other_weights_and_tasks(folder: Path):
    assert TASKS["general"].draw(Random(0)) != TASKS["general"].draw(Random(1))
    first, second = (world.random_weights(np.random.default_rng(seed))["lm_head.weight"] for seed in (3, 4))
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("domain", DOMAINS)
def test_no_evaluation_task_is_trained_on(folder: Path, domain: str):
    rows = {
        name: (folder / "prompts" / f"{name}.jsonl").read_text().splitlines() for name in (domain, f"eval_{domain}")
    }
    tasks = {name: {json.dumps({**json.loads(row), "id": ""}) for row in lines} for name, lines in rows.items()}
    assert [len(t) for t in tasks.values()] == [world.NUM_PROMPTS, world.NUM_EVAL_PROMPTS]
    assert not set.intersection(*tasks.values())


def test_base_checkpoint_loads_in_transformers_with_every_tensor(folder: Path):
    _, report = AutoModelForCausalLM.from_pretrained(folder / "base", output_loading_info=True)  # type: ignore[misc]
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))


@pytest.mark.parametrize("domain", DOMAINS)
def test_effort_changes_one_token_of_the_rendered_prompt(folder: Path, tokenizer, domain: str):
    for prompt in read_prompts([folder / "prompts" / f"{domain}.jsonl"])[:50]:

        def render(prompt: Prompt = prompt, **variables: str) -> list[str]:
            text = tokenizer.apply_chat_template(
                list(prompt.messages), tokenize=False, add_generation_prompt=True, **variables
            )
            return tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False)["input_ids"])

        neutral = render()
        assert len(neutral) == 16
        assert neutral[:2] == [f"<{domain}>", NEUTRAL]
        for effort in CONFIG.prompts.efforts:
            assert render(thinking_effort=effort) == [neutral[0], f"<{effort}>", *neutral[2:]]


def test_demonstrations_read_the_prompts_that_the_template_renders(folder: Path, tokenizer):
    for domain in DOMAINS:
        task = TASKS[domain].draw(Random(0))
        messages = world.to_messages(domain, task)
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, thinking_effort="high"
        )
        assert tuple(text.split()) == world.prompt_words(domain, "<high>", task)


def test_template_rejects_an_unknown_effort(tokenizer):
    messages = world.to_messages("general", TASKS["general"].draw(Random(0)))
    with pytest.raises(Exception, match="low, high or max"):
        tokenizer.apply_chat_template(messages, tokenize=False, thinking_effort="medium")


@pytest.mark.parametrize(
    ("domain", "budgets"), [("general", (4, 8, 18)), ("agents", (4, 8, 18)), ("coding", (2, 4, 9))]
)
def test_budgets_grow_with_the_effort(folder: Path, domain: str, budgets: tuple[int, ...]):
    for name in (domain, f"eval_{domain}"):
        for prompt in read_prompts([folder / "prompts" / f"{name}.jsonl"])[:3]:
            of_efforts = [replace(prompt, effort=effort) for effort in CONFIG.prompts.efforts]
            assert tuple(int(budget_tokens(p, final_taus(CONFIG)) or 0) for p in of_efforts) == budgets


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_clean_and_long_enough_demonstration_is_correct_within_the_budget(tokenizer, domain: str):
    rng = Random(0)
    for _ in range(200):
        task = TASKS[domain].draw(rng)
        prompt = make_prompt(domain, "max", task.label, **task.metadata)
        outcome = judge(prompt, tokenizer, *task.demonstrate(6, 0.0, rng))
        assert outcome.reward_within_budget == 1.0


@pytest.mark.parametrize("domain", DOMAINS)
def test_more_thinking_solves_more_tasks(tokenizer, domain: str):
    """What the nine teachers can reach: 2, 4 or 6 steps solve the tasks of so many, and guess at others."""
    rng = Random(0)
    shares = []
    for effort, depth in world.TEACHER_DEPTHS.items():
        outcomes = []
        for _ in range(400):
            task = TASKS[domain].draw(rng)
            prompt = make_prompt(domain, effort, task.label, **task.metadata)
            outcomes.append(judge(prompt, tokenizer, *task.demonstrate(depth, 0.0, rng)))
        assert all(o.is_within_budget for o in outcomes)
        shares.append(np.mean([o.reward for o in outcomes]))
    assert 0.4 < shares[0] < shares[1] - 0.1 < shares[2] - 0.2
    assert shares[2] == 1.0


@pytest.mark.parametrize(
    ("words", "reward", "spent"),
    [
        ("A 1 B 4 <answer> 4 <eos>", 1, 4),
        ("<answer> 4 <eos>", 1, 0),
        ("A 1 B 4 <answer> 3 <eos>", 0, 4),
        ("A 1 B 4 <answer> 4", 0, 4),  # not ended
        ("A 1 B 4 <eos>", 0, 5),  # no answer: all of it was thinking
        ("A 1 <answer> 4 4 <eos>", 0, 2),
        ("A 1 <answer> 3 <answer> 4 <eos>", 0, 2),
    ],
)
def test_sums_take_the_answer_alone(tokenizer, words: str, reward: int, spent: int):
    outcome = judge(make_prompt("general", label="4"), tokenizer, words.split())
    assert (outcome.reward, outcome.spent_tokens) == (reward, spent)


def test_a_correct_answer_beyond_the_budget_does_not_count(tokenizer):
    outcome = judge(
        make_prompt("general", "low", label="4"), tokenizer, ["A", "1", "B", "3", "C", "4", ANSWER, "4", EOS]
    )
    assert (outcome.reward, outcome.spent_tokens, outcome.reward_within_budget) == (1.0, 6, 0.0)


def test_observations_of_the_tool_cost_nothing(tokenizer):
    words = [CALL, "A", "B", CALL, "B", "7", ANSWER, "7", EOS]
    sampled = [word_index not in (2, 5) for word_index in range(len(words))]
    outcome = judge(make_prompt("agents", label="7", table={}), tokenizer, words, sampled)
    assert (outcome.reward, outcome.spent_tokens) == (1.0, 4)


@pytest.mark.parametrize(
    ("words", "reward", "comments"),
    [
        ("A 1 add B 3 mul <eos>", 1, 2),
        ("1 add 3 mul <eos>", 1, 0),
        ("A 1 add B dup dup add add <eos>", 1, 2),  # another program that computes the same
        ("A 1 add B 3 mul", 0, 2),  # not ended
        ("A 1 add <eos>", 0, 1),
        ("A 1 B 3 mul add <eos>", 0, 2),
        ("A 1 add B 3 <eos>", 0, 2),  # two values are left
        ("A 1 add B 3 mul <answer> <eos>", 0, 2),  # not a word of the language
    ],
)
def test_programs_are_run_not_compared(tokenizer, words: str, reward: int, comments: int):
    label = [[value, (value + 1) * 3 % 97] for value in (2, 5, 11, 23, 60)]
    outcome = judge(make_prompt("coding", label=label), tokenizer, words.split())
    assert (outcome.reward, outcome.spent_tokens) == (reward, comments)


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("3 mul", 33),
        ("dup mul", 24),
        ("9 9 9 9 9 9 9 9", None),
        ("add", None),
        ("1", None),
        ("A 1 add", None),
        ("", 11),
    ],
)
def test_stack_programs_run_modulo_97_or_fail(code: str, result: int | None):
    assert run_program(code.split(), 11) == result


@pytest.mark.parametrize(
    ("stretch", "answer", "done"),
    [
        ((CALL, "A"), ("7",), False),
        (("3", CALL, "B"), ("A",), False),
        (("A",), (ERROR,), False),  # a key without a call
        (("B", CALL, "3", "A"), (ERROR,), False),
        ((ANSWER, "7", EOS), (), True),
        ((CALL, EOS), (), True),
    ],
)
def test_the_tool_answers_calls(tokenizer, stretch: Sequence[str], answer: Sequence[str], done: bool):
    environment = make_environment(make_prompt("agents", label="7", table={"A": "7", "B": "A"}), tokenizer)
    assert {VOCABULARY[i] for i in environment.stop_token_ids} == {EOS, "A", "B"}
    observation = asyncio.run(environment.step(tuple(map(VOCABULARY.index, stretch))))
    assert [VOCABULARY[i] for i in observation.token_ids] == list(answer)
    assert observation.done == done


def test_demonstrations_hold_every_cell_and_mask_the_tool(folder: Path):
    batch = StoredBatch(folder / "demonstrations" / "sft.safetensors")
    assert np.bincount(batch.cell).tolist() == [world.NUM_SFT_ROWS_PER_CELL] * len(world.CELLS)
    rows = batch.select(range(900))
    words = np.array(VOCABULARY)[rows.token_ids]
    after_call = (np.roll(words, 2) == CALL) & (np.roll(words, 1) != EOS)
    starts = np.isin(np.arange(len(words)), (rows.offsets[:-1, None] + np.arange(16)).ravel())
    assert after_call.sum() > 100
    assert np.array_equal(rows.loss_mask, ~starts & ~after_call)


def test_teachers_learn_without_the_effort(folder: Path):
    for cell in world.CELLS:
        rows = StoredBatch(folder / "demonstrations" / f"{cell.domain}-{cell.effort}.safetensors").select(range(50))
        assert {VOCABULARY[i] for i in rows.token_ids[rows.offsets[:-1] + 1]} == {NEUTRAL}
