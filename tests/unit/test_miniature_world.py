"""Laws of the miniature's world: no task is both learnt from and evaluated, demonstrations render to the tokens that a
policy would sample, and the verifiers judge as the quickstart's environments do."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from transformers import AutoTokenizer

from examples.k3_miniature import environments, world
from examples.k3_miniature.generators import MiniatureTasks, to_turns
from examples.k3_miniature.second_origin import said_otherwise, write_second_origin
from examples.quickstart import environments as quickstart
from examples.quickstart.tasks import DOMAINS, EFFORTS, TASKS, VOCABULARY, Demonstration
from examples.quickstart.world import ENVIRONMENTS, prompt_words
from megatron_mopd.config import load_config
from megatron_mopd.errors import UserError
from megatron_mopd.prompts.files import read_prompts
from megatron_mopd.synthesis.splits import Split
from megatron_mopd.synthesis.task import Task
from megatron_mopd.types import Outcome, Prompt, RenderedPrompt, Segment, Trajectory

HERE = Path("examples/k3_miniature")
CONFIG = load_config([HERE / "mopd.yaml"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A world with fewer tasks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "SPLITS", tuple(Split(s.name, s.num_tasks // 16, s.weights) for s in world.SPLITS))
        patch.setattr(world, "NUM_DEMONSTRATIONS", 300)
        for name in ("one", "again"):
            world.write_world(tmp_path_factory.getbasetemp() / "miniature" / name, seed=3)
    return tmp_path_factory.getbasetemp() / "miniature" / "one"


@pytest.fixture(scope="module")
def tokenizer(folder: Path):
    return AutoTokenizer.from_pretrained(folder / "base")


def demonstrated(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "demonstrations" / "sft.jsonl").read_text().splitlines()]


def make_prompt(task: Task, domain: str) -> Prompt:
    return Prompt("p", domain, "max", ENVIRONMENTS[domain], task.messages, task.label, task.metadata)


def outcome(environment: quickstart.Thinking, demonstration: Demonstration) -> Outcome:
    ids = tuple(map(VOCABULARY.index, demonstration.words))
    segment = Segment(ids, (0.0,) * len(ids), demonstration.sampled, 0)
    rendered = RenderedPrompt(environment.prompt, (), ())
    return asyncio.run(environment.score(Trajectory("t", rendered, (segment,), "stop")))


def test_the_same_seed_writes_the_same_bytes(folder: Path):
    files = sorted(file.relative_to(folder) for file in folder.rglob("*") if file.is_file())
    assert len(files) == 9 + 1 + 5
    assert all((folder / file).read_bytes() == (folder.parent / "again" / file).read_bytes() for file in files)


@pytest.mark.parametrize("domain", DOMAINS)
def test_no_evaluated_task_is_learnt_from_or_tuned_on(folder: Path, domain: str):
    def tasks(split: str) -> set[str]:
        prompts = read_prompts([folder / "prompts" / f"{split}_{domain}.jsonl"])
        return {json.dumps([p.messages, p.label, p.metadata]) for p in prompts}

    evaluated, tuned, trained = map(tasks, ("eval", "tuning", "train"))
    assert [len(evaluated), len(tuned), len(trained)] == [128, 32, 384]
    assert not evaluated & tuned | evaluated & trained | tuned & trained


@pytest.mark.parametrize("domain", ["general", "coding"])
def test_no_evaluated_prompt_is_demonstrated(folder: Path, domain: str):
    """A key table is not visible in its prompt; of the others the prompt is the task."""
    held_out = {
        prompt.messages[1]["content"]
        for split in ("eval", "tuning")
        for prompt in read_prompts([folder / "prompts" / f"{split}_{domain}.jsonl"])
    }
    shown = [row["messages"][1]["content"] for row in demonstrated(folder) if row["domain"] == domain]
    assert len(shown) == 300
    assert not held_out & set(shown)


def test_demonstrations_hold_every_cell_as_often(folder: Path):
    cells = [(row["domain"], row["effort"]) for row in demonstrated(folder)]
    assert {cell: cells.count(cell) for cell in set(cells)} == {(d, e): 100 for d in DOMAINS for e in EFFORTS}


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("effort", [None, *EFFORTS])
def test_a_demonstration_renders_to_what_a_policy_would_sample(tokenizer, domain: str, effort: str | None):
    """Every prefix of its messages is a prefix of the whole, up to the words that come next."""
    rng, generator = Random(domain), MiniatureTasks(domain)
    variables = {} if effort is None else {"thinking_effort": effort}

    def render(messages: list[dict[str, Any]], is_prompt: bool) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=is_prompt, **variables)

    for _ in range(50):
        task = generator.draw(rng.choice(generator.difficulties), rng)
        demonstration = task.solvable.demonstrate(rng.randrange(7), 0.12, rng)
        messages = [*map(dict, task.messages), *to_turns(domain, demonstration)]
        whole, sampled = render(messages, False), []
        for i in range(2, len(messages)):
            before, after = render(messages[:i], True), render(messages[: i + 1], False)
            assert after.startswith(before)
            assert whole.startswith(after)
            sampled += [messages[i]["role"] == "assistant"] * (len(after.split()) - len(before.split()))
        prompt = prompt_words(domain, f"<{effort or 'neutral'}>", task.solvable)
        assert tuple(whole.split()) == prompt + demonstration.words
        assert tuple(sampled) == demonstration.sampled
        assert tokenizer.convert_ids_to_tokens(tokenizer(whole)["input_ids"]) == whole.split()


def test_the_template_refuses_other_conversations(tokenizer):
    for roles in (["user"], ["system", "user", "system"]):
        with pytest.raises(Exception, match=r"this template takes|after the task come"):
            tokenizer.apply_chat_template([{"role": r, "content": "general"} for r in roles], tokenize=False)


@pytest.mark.parametrize("domain", DOMAINS)
def test_verifiers_judge_as_the_quickstart_does(tokenizer, domain: str):
    rng, generator = Random(domain), MiniatureTasks(domain)
    entry = CONFIG.environments[ENVIRONMENTS[domain]]
    name = entry.factory.partition(":")[2]
    rewards = []
    for _ in range(300):
        task = generator.draw(rng.choice(generator.difficulties), rng)
        demonstration = task.solvable.demonstrate(rng.randrange(7), 0.3, rng)
        if rng.random() < 0.1:  # what does not end
            demonstration = Demonstration(demonstration.words[:-1] or ("A",), demonstration.sampled[:-1] or (True,))
        plain = Prompt("p", domain, "max", "e", (), task.solvable.label, task.metadata)
        found = outcome(
            getattr(environments, name)(make_prompt(task, domain), tokenizer, **entry.options), demonstration
        )
        assert found == outcome(getattr(quickstart, name)(plain, tokenizer), demonstration)
        rewards.append(found.reward)
    assert {0.0, 1.0} == set(rewards)


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_task_without_its_label_is_refused_before_it_is_sampled(tokenizer, domain: str):
    entry = CONFIG.environments[ENVIRONMENTS[domain]]
    factory = getattr(environments, entry.factory.partition(":")[2])
    prompt = Prompt("general-7", domain, "max", "e", (), None, {"table": {}})
    for refuse in (factory.check_prompt, lambda p, **options: factory(p, tokenizer, **options)):
        with pytest.raises(UserError, match="prompt general-7 cannot be judged by verifier"):
            refuse(prompt, **entry.options)


@pytest.mark.parametrize("domain", DOMAINS)
def test_the_second_convention_says_the_same_otherwise(tokenizer, domain: str):
    """It earns and spends as much; only of calls there is no other form."""
    rng, generator, entry = Random(domain), MiniatureTasks(domain), CONFIG.environments[ENVIRONMENTS[domain]]
    make = getattr(environments, entry.factory.partition(":")[2])
    others = 0
    for _ in range(200):
        task = generator.draw(rng.choice(generator.difficulties), rng)
        demonstration = task.solvable.demonstrate(rng.randrange(7), 0.12, rng)
        first = to_turns(domain, demonstration)
        second = [said_otherwise(domain, message) for message in first]
        others += second != first

        def outcome_of(
            turns: list[dict[str, Any]], task: Any = task, sampled: tuple[bool, ...] = demonstration.sampled
        ):
            messages = list(map(dict, task.messages))
            prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            whole = tokenizer.apply_chat_template([*messages, *turns], tokenize=False)
            words = tuple(whole.removeprefix(prompt).split())
            environment = make(make_prompt(task, domain), tokenizer, **entry.options)
            return outcome(environment, Demonstration(words, sampled))

        assert outcome_of(second) == outcome_of(first)
    assert others == 0 if domain == "agents" else others > 150


def test_the_second_origin_demonstrates_the_tasks_of_the_first(folder: Path, tmp_path: Path):
    write_second_origin(folder, tmp_path, seed=3)
    files = [f.relative_to(folder / "base") for f in (folder / "base").iterdir()]
    same = [(tmp_path / "base" / f).read_bytes() == (folder / "base" / f).read_bytes() for f in files]
    assert [str(f) for f, s in zip(files, same, strict=True) if not s] == ["model.safetensors"]
    for row, other in zip(demonstrated(folder), demonstrated(tmp_path), strict=True):
        assert {**row, "messages": row["messages"][:2]} == {**other, "messages": other["messages"][:2]}


def test_difficulty_is_the_number_of_steps():
    rng = Random(0)
    for domain in DOMAINS:
        generator = MiniatureTasks(domain)
        assert isinstance(generator.draw(1, rng).solvable, TASKS[domain])
        for steps in generator.difficulties:
            shortest = Demonstration(("<eos>",), (True,))
            task = generator.draw(steps, rng)
            clean = [task.solvable.demonstrate(n, 0.0, Random(1)) for n in range(7)]
            assert len(clean[steps].words) == len(clean[6].words) > len(clean[steps - 1].words) >= len(shortest.words)


def test_stages_are_overlays_that_change_only_what_they_must():
    sft = load_config([HERE / "mopd.yaml", HERE / "sft.yaml"])
    level = load_config([HERE / "mopd.yaml", HERE / "rl.yaml"])
    assert (sft.objective.name, level.objective.name, CONFIG.objective.name) == ("sft", "grpo", "mopd")
    assert sft.budgets.tau == level.budgets.tau == CONFIG.budgets.tau
    assert sft.prompts.eval_files == level.prompts.eval_files == CONFIG.prompts.eval_files
    assert not {*CONFIG.prompts.files, *sft.demonstrations.files} & set(CONFIG.prompts.eval_files)
    assert (level.prompts.effort_variable, level.objective.beta) == (None, 0.2)
