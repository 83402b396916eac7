"""README and docs say only what is true: their YAML loads, their commands exist, their paths and options are there."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from test_layout import QWEN3_MOE

from megatron_mopd import cli
from megatron_mopd.config import Config, Table, Teacher, load_config
from megatron_mopd.errors import UserError
from megatron_mopd.mcore.layout import Layout
from megatron_mopd.pipeline.graph import load_pipeline
from megatron_mopd.prompts.demonstrations import read_demonstrations
from megatron_mopd.prompts.files import read_prompts
from megatron_mopd.protocols import Verifier
from megatron_mopd.teachers.router import Router
from megatron_mopd.types import Cell, Prompt

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
PAGES = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in FILES}
README = PAGES["README.md"]
PIPELINES = "docs/pipeline.md"
TOP = {p.name for p in ROOT.iterdir()} - {".venv", "runs"}  # made by the commands, not part of the repository


def blocks(language: str) -> list[tuple[str, str]]:
    """(page, text) of every fenced block in that language."""
    fenced = re.compile(rf"^```{language}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [(page, text) for page, content in PAGES.items() for text in fenced.findall(content)]


def code_spans(content: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", content, flags=re.MULTILINE | re.DOTALL))


def commands() -> Iterator[str]:
    for _, text in blocks("bash"):
        yield from (line.partition("#")[0].strip() for line in text.replace("\\\n", " ").splitlines())
    for content in PAGES.values():
        yield from code_spans(content)


def test_every_yaml_block_is_a_configuration(tmp_path: Path) -> None:
    """The first is complete, the others overlay it."""
    texts = [text for page, text in blocks("yaml") if page != PIPELINES]
    files = [tmp_path / f"{number}.yaml" for number, _ in enumerate(texts)]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
        load_config([files[0], file])


def test_every_yaml_block_of_its_page_is_a_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is complete, the others say more."""
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/sft.jsonl").touch()
    Path("data/eval.jsonl").touch()
    first, *others = (text for page, text in blocks("yaml") if page == PIPELINES)
    for text in ("", *others):
        Path("pipeline.yaml").write_text(first + text)
        load_pipeline(Path("pipeline.yaml"))


def test_every_json_block_is_a_prompt_or_a_demonstration(tmp_path: Path) -> None:
    assert len(blocks("json")) > 1
    for _, text in blocks("json"):
        file = tmp_path / "lines.jsonl"
        file.write_text(text)
        assert read_prompts([file]) if "environment" in json.loads(text) else read_demonstrations([file])


def test_the_python_of_the_docs_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for _, text in blocks("python"):
        exec(text, names)
    assert len(read_prompts([tmp_path / "prompts" / "train_general.jsonl"])) == 5000
    task = names["Additions"]().draw(2, Random(0))
    assert sum(map(int, task.messages[0]["content"].split(" + "))) == int(task.label)
    verifier, prompt = names["EvenNumber"](), Prompt("p", "math", "", "e", (), label=True)
    assert isinstance(verifier, Verifier)
    verifier.check(prompt)
    assert [asyncio.run(verifier.verify(prompt, answer)) for answer in ("12", "7", "twelve")] == [1.0, 0.0, 0.0]


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {m[1] for c in commands() if (m := re.match(r"make ([a-z-]+)", c))}
    assert {"demo", "test", "check", "format"} <= named | targets
    assert named <= targets


def test_every_mopd_command_exists() -> None:
    known = set(re.findall(r"^    mopd ([a-z-]+)", cli.__doc__ or "", re.MULTILINE))
    named = {m[1] for c in commands() if (m := re.match(r"mopd ([a-z-]+)", c))}
    assert {"train", "preflight", "eval", "report"} <= named
    assert named <= known


def test_every_module_that_is_run_exists() -> None:
    named = {m[1] for c in commands() if (m := re.search(r"-m ([a-z0-9_.]+)", c))}
    assert "megatron_mopd.train" in named
    assert [name for name in named if not (ROOT / (name.replace(".", "/") + ".py")).is_file()] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_path_exists(page: str) -> None:
    spans = [word for span in code_spans(PAGES[page]) for word in span.split() if word.partition("/")[0] in TOP]
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", PAGES[page]) if "://" not in link]
    paths = [ROOT / word for word in spans] + [(ROOT / page).parent / link for link in links]
    assert len(paths) > 2
    assert [str(path) for path in paths if not path.exists()] == []


def test_every_option_of_the_table_exists_with_its_default() -> None:
    rows = re.findall(r"^\| (`[a-z_]+\.[^|]+)\|([^|]*)\|", README, re.MULTILINE)
    assert len(rows) > 10
    for options, defaults in rows:
        names, values = code_spans(options), code_spans(defaults)
        for i, name in enumerate(names):
            table, field = name.split(".")
            annotation = Config.model_fields[table].annotation
            assert isinstance(annotation, type)
            assert issubclass(annotation, Table)
            default = annotation.model_fields[field]
            if values:
                want = default.get_default()
                want = list(want) if isinstance(want, tuple) else want
                assert yaml.safe_load(values[i if len(values) > 1 else 0]) == want, name
            else:
                assert default.is_required() or isinstance(default.get_default(), dict), f"{name} has a default: say it"


def test_refusals_of_the_readme_are_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    line = '{"id": "%d", "domain": "math", "environment": "e", "messages": [{"role": "user", "content": "1"}]}\n'
    lines = [line % i for i in range(211)] + ['{"id": "x", "environment": "e", "messages": []}\n']
    Path("data/math.jsonl").write_text("".join(lines))
    Path("mine.yaml").write_text(blocks("yaml")[0][1])
    teachers = [Teacher(name="code-low", domain="code", effort="low", checkpoint=Path("a"))]
    mistakes = [
        lambda: load_config(["mine.yaml"], ["objective.rmax=3"]),
        lambda: Router(teachers, [Cell("code", "low"), Cell("code", "max")]),
        lambda: read_prompts([Path("data/math.jsonl")]),
        lambda: Layout.from_table({"expert_model_parallel_size": 3}).check(QWEN3_MOE, 3),
    ]
    for mistake in mistakes:
        with pytest.raises(UserError) as caught:
            mistake()
        assert f"mopd: error: {caught.value}\n" in README


def test_results_of_the_demo_have_their_place() -> None:
    assert README.index("<!-- demo results: begin -->") < README.index("<!-- demo results: end -->")
