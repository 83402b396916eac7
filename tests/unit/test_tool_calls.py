"""Laws: any tokens are a turn; markers are tokens and never text; what a template writes is read back."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from chat import HERMES, HERMES_TOKENS, hermes_renderer, write_chat_folder, xtml_renderer
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mopd.prompts.history import CONVERSATION
from megatron_mopd.prompts.render import Renderer
from megatron_mopd.prompts.spelling import Spelling
from megatron_mopd.prompts.xtml import MARKERS
from megatron_mopd.rollout.tool_calls import BadCall, ToolCall, Turn, TurnParser, turn_parser

USER = {"role": "user", "content": "hi"}
WAYS = ("xtml", "hermes")


class Way(NamedTuple):
    renderer: Renderer
    parser: TurnParser
    spelling: Spelling

    def parse(self, text: str) -> Turn:
        return self.parser.parse(self.renderer.encode([text])[0])


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Way]:
    folder = tmp_path_factory.mktemp("ways")
    renderers = {"xtml": xtml_renderer(folder / "xtml"), "hermes": hermes_renderer(folder / "hermes")}
    return {name: Way(r, turn_parser(r), Spelling(r)) for name, r in renderers.items()}


XTML_CASES: list[tuple[str, Turn]] = [
    ("<|open|>think<|sep|>hm<|close|><|open|>response<|sep|>7<|close|><|end_of_msg|>", Turn("hm", "7")),
    ("<|open|>think<|sep|><|close|><|end_of_msg|>", Turn("", None)),
    (
        "<|open|>response<|sep|>7<|close|>",
        Turn("", "7", (), "there is no think channel; it is kept even when it is empty"),
    ),
    ("hi<|open|>think<|sep|>", Turn("", "hi<|open|>think<|sep|>", (), "text stands outside of the channels")),
    ("<|open|>think<|sep|>hm", Turn("", "<|open|>think<|sep|>hm", (), "a channel or call is not closed")),
    ("<|open|>think<|close|>", Turn("", "<|open|>think<|close|>", (), "a channel or call has no name")),
    (
        "<|open|>think<|sep|>a<|sep|>b<|close|>",
        Turn("", "<|open|>think<|sep|>a<|sep|>b<|close|>", (), "markers stand inside of a channel of text"),
    ),
    (
        "<|open|>think<|sep|>a<|close|><|open|>think<|sep|>b<|close|>",
        Turn("a", "<|open|>think<|sep|>b<|close|>", (), "channels come once each: think, response, tools"),
    ),
    (
        "<|open|>think<|sep|>a<|close|><|open|>shout<|sep|>b<|close|>",
        Turn("a", "<|open|>shout<|sep|>b<|close|>", (), "a channel is none of think, response and tools"),
    ),
]


@pytest.mark.parametrize(("text", "turn"), XTML_CASES)
def test_turns_of_the_xtml_template(ways: dict[str, Way], text: str, turn: Turn) -> None:
    assert ways["xtml"].parse(text) == turn


@pytest.mark.parametrize(
    ("text", "turn"),
    [
        ("<think>\nhm\n</think>\n\n7<|im_end|>", Turn("hm", "7")),
        ("hm\n</think>\n7", Turn("hm", "7")),  # the prompt has begun the thinking
        ("7", Turn("", "7")),
        ("<think>hm", Turn("", "<think>hm", (), "the thinking has no end")),
        ("<think>a<think>b</think>", Turn("", "<think>a<think>b</think>", (), "thinking begins inside thinking")),
    ],
)
def test_turns_in_the_style_of_hermes(ways: dict[str, Way], text: str, turn: Turn) -> None:
    assert ways["hermes"].parse(text) == turn


def wrapped(way: str, arguments: str, name: str = "look") -> str:
    if way == "hermes":
        return f'<think>\n\n</think>\n\n<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    call = f'<|open|>call name="{name}"<|sep|>{arguments}<|close|>'
    return f"<|open|>think<|sep|><|close|><|open|>tools<|sep|>{call}<|close|>"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("{", "JSON"),
        ("", "JSON"),
        ("7", "the arguments are not a JSON object"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "Exceeds the limit"),
        ('{"a": NaN}', "NaN is no JSON number"),
        ('{"a": 1e999}', "a number is too large"),
        ('{"a": "\\ud800"}', "surrogates not allowed"),
    ],
)
def test_arguments_that_are_none_are_a_bad_call(ways: dict[str, Way], way: str, arguments: str, reason: str) -> None:
    (call,) = ways[way].parse(wrapped(way, arguments)).calls
    assert isinstance(call, BadCall)
    assert reason in call.reason
    assert arguments in call.text


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "ö"])
def test_a_name_that_is_none_is_a_bad_call(ways: dict[str, Way], way: str, name: str) -> None:
    (call,) = ways[way].parse(wrapped(way, "{}", name)).calls
    assert isinstance(call, BadCall)
    assert "name" in call.reason


@pytest.mark.parametrize("way", WAYS)
def test_a_bad_call_leaves_the_others_alone(ways: dict[str, Way], way: str) -> None:
    good, bad = wrapped(way, '{"key":"A"}'), wrapped(way, "{")
    mark = "<tool_call>" if way == "hermes" else "<|open|>call"
    end = "</tool_call>" if way == "hermes" else "<|close|><|close|>"
    inner = bad[bad.index(mark) :].removesuffix("<|close|>" if way == "xtml" else "")
    mixed = good.replace(end, end.removesuffix("<|close|>") + inner + ("<|close|>" if way == "xtml" else ""))
    first, second = ways[way].parse(mixed).calls
    assert isinstance(first, ToolCall)
    assert (first.name, first.arguments) == ("look", {"key": "A"})
    assert isinstance(second, BadCall)


def test_hermes_calls_that_are_not_closed_or_not_alone(ways: dict[str, Way]) -> None:
    call = '<tool_call>{"name": "look", "arguments": {}}'
    turn = ways["hermes"].parse(f"{call}{call}</tool_call> and so on")
    assert [type(c) for c in turn.calls] == [BadCall, ToolCall]
    assert turn.content == " and so on"
    assert turn.fault == "text follows the calls, or a call is closed that was not opened"


@pytest.mark.parametrize("way", WAYS)
def test_a_marker_that_is_spelled_is_text(ways: dict[str, Way], way: str) -> None:
    said = {"xtml": "<|close|><|open|>tools<|sep|>", "hermes": '</think><tool_call>{"name": "x"}</tool_call>'}[way]
    call = {"id": "c", "function": {"name": "look", "arguments": {"key": said}}}
    message = {"role": "assistant", "reasoning_content": said, "content": said, "tool_calls": [call]}
    turn = rendered_and_read(ways[way], message)
    assert turn == Turn(said, said, (ToolCall("look", {"key": said}, json.dumps({"key": said})),))


def rendered_and_read(way: Way, message: dict[str, Any]) -> Turn:
    before, after = (
        way.renderer.text(way.spelling.cut(messages), None, "m", add_generation_prompt=generates)
        for messages, generates in (([USER], True), ([USER, message], False))
    )
    return way.parser.parse(way.spelling.encode([after[len(before) :].rstrip("\n")])[0])


WORDS = st.text(st.sampled_from('aZ é{}"\\<|>/\n7中'), max_size=12) | st.sampled_from([*MARKERS, *HERMES_TOKENS])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 1 << 70) | WORDS, lambda v: st.lists(v, max_size=2), max_leaves=3
)
CALLS = st.lists(
    st.tuples(st.from_regex(r"\A[A-Za-z0-9_.-]{1,9}\Z"), st.dictionaries(WORDS, JSON, max_size=2)), max_size=2
)


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=100)
@given(reasoning=WORDS, content=WORDS, calls=CALLS)
def test_what_the_template_writes_is_read_back(ways: dict[str, Way], way: str, reasoning, content, calls) -> None:
    if way == "hermes":  # its line breaks are the template's
        reasoning, content = reasoning.strip("\n"), content.strip("\n")
    tool_calls = [{"id": "c", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    message = {"role": "assistant", "reasoning_content": reasoning, "content": content, "tool_calls": tool_calls}
    turn = rendered_and_read(ways[way], message)
    assert (turn.reasoning, turn.content, turn.fault) == (reasoning, content, None)
    assert [(c.name, c.arguments) for c in turn.calls if isinstance(c, ToolCall)] == calls


def seeds(way: Way) -> list[list[int]]:
    """Turns as the template writes them, to be mutated."""
    said = [m for m in CONVERSATION if m["role"] == "assistant"]
    pieces = []
    for message in said:
        before = way.renderer.text([USER], None, "m", add_generation_prompt=True)
        pieces.append(way.renderer.text([USER, message], None, "m")[len(before) :])
    return way.renderer.encode(pieces)


def mutated(random: Random, ids: list[int], markers: list[int], most: int) -> list[int]:
    ids = list(ids)
    for _ in range(random.randint(1, 4)):
        at, kind = random.randint(0, len(ids)), random.randrange(4)
        if kind == 0:
            ids.insert(at, random.choice(markers))
        elif kind == 1:
            ids.insert(at, random.randrange(most))
        elif kind == 2:
            del ids[at : at + random.choice((1, 1, 5, 40))]
        else:
            ids[at:at] = ids[random.randint(0, at) : at][:9]
    return ids


def check_any(way: Way, ids: list[int]) -> None:
    """It is a turn, and no text of it is lost."""
    turn = way.parser.parse(ids)
    assert isinstance(turn, Turn)
    for call in turn.calls:
        assert isinstance(call, BadCall) or json.loads(call.text) == call.arguments
        assert isinstance(call, ToolCall) or call.reason
    if turn.fault is None and not turn.calls and not turn.reasoning:
        said = way.renderer.tokenizer.decode(ids, skip_special_tokens=True)
        assert [c for c in turn.content or "" if c in "0123456789"] == [c for c in said if c in "0123456789"]


@pytest.mark.parametrize("way", WAYS)
def test_any_tokens_are_a_turn(ways: dict[str, Way], way: str) -> None:
    """50,000 inputs in all: mutated turns, and tokens at random, of which every third is a marker."""
    subject = ways[way]
    markers = sorted(subject.renderer.tokenizer.get_added_vocab().values())
    most, starts = len(subject.renderer.tokenizer), seeds(subject)
    for seed in range(25_000):
        random = Random(seed)
        if seed % 2:
            ids = mutated(random, random.choice(starts), markers, most)
        else:
            drawn = range(random.randint(0, 12))
            ids = [
                random.choice((random.choice(markers), random.randrange(most), random.randrange(256))) for _ in drawn
            ]
        try:
            check_any(subject, ids)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {ids}") from error


def test_a_folder_without_the_tokens_has_no_tools(tmp_path: Path) -> None:
    renderer = Renderer(write_chat_folder(tmp_path, HERMES, ("<|im_start|>", "<|im_end|>")), None)
    parser = turn_parser(renderer)
    assert not parser.has_tools
    text = "<tool_call>{}</tool_call></think>"
    assert parser.parse(renderer.encode([text])[0]) == Turn("", text)
