"""Three kinds of tasks over one vocabulary of 48 words, with demonstrations of how to solve them.

| domain  | the prompt shows                     | a solution                    | is correct if it              |
|---------|--------------------------------------|-------------------------------|-------------------------------|
| general | labelled digits up to `<end>`        | running sums, then the answer | ends with the sum modulo 5    |
| agents  | the first key of a hidden table      | one tool call per key         | ends with the end of a chain  |
| coding  | how far to write, lines out of order | a stack program with comments | computes the right function   |

A task takes 1 to 6 steps. A demonstration that stops thinking early has to guess, or leaves its program unfinished:
this makes effort real. Everything is drawn from the `random.Random` passed in: the same seed gives the same tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple, Protocol, Self

DOMAINS = ("general", "agents", "coding")
EFFORTS = ("low", "high", "max")

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
NEUTRAL, THINK, ANSWER, CALL, ERROR, END = "<neutral>", "<think>", "<answer>", "<call>", "<error>", "<end>"
DIGITS = tuple("0123456789")
LETTERS = tuple("ABCDEFGHIJ")
STACK_WORDS = ("dup", "add", "mul")
OPERATIONS = {
    "+1": ("1", "add"),
    "+2": ("2", "add"),
    "+3": ("3", "add"),
    "*2": ("dup", "add"),
    "*3": ("3", "mul"),
    "^2": ("dup", "mul"),
    "*7": ("7", "mul"),
}
"""What an operation of a coding prompt means in the stack language."""

VOCABULARY = (
    *(PAD, EOS, UNKNOWN),
    *(f"<{domain}>" for domain in DOMAINS),
    *(NEUTRAL, *(f"<{effort}>" for effort in EFFORTS)),
    *(THINK, ANSWER, CALL, ERROR, END),
    *(*STACK_WORDS, *DIGITS, *LETTERS, *OPERATIONS),
    *(f"<unused{i}>" for i in range(3)),  # so that two tensor-parallel ranks hold 24 words each
)

BODY_WORDS = 13
STEP_WEIGHTS = (0.25, 0.2, 0.15, 0.15, 0.125, 0.125)
"""Probability that a task takes 1, 2, ... 6 steps."""
SUM_MODULUS, PROGRAM_MODULUS, MAX_STACK = 5, 97, 8
PROGRAM_INPUTS = (2, 5, 11, 23, 60)


class Demonstration(NamedTuple):
    """A response in words; `sampled` is False for the words that the tool returns."""

    words: tuple[str, ...]
    sampled: tuple[bool, ...]


class Task(Protocol):
    @classmethod
    def draw(cls, rng: Random, step_weights: Sequence[float] = STEP_WEIGHTS) -> Self: ...

    @property
    def words(self) -> tuple[str, ...]:
        """What the prompt shows, at most BODY_WORDS words."""
        ...

    @property
    def label(self) -> Any:
        """What the verifier needs to judge a response."""
        ...

    @property
    def metadata(self) -> dict[str, Any]:
        """What the environment needs beside the prompt."""
        ...

    def demonstrate(self, num_steps: int, error_rate: float, rng: Random) -> Demonstration:
        """A response that thinks for at most `num_steps` steps, each wrong with probability `error_rate`."""
        ...


def draw_num_steps(rng: Random, step_weights: Sequence[float]) -> int:
    return rng.choices(range(1, len(step_weights) + 1), step_weights)[0]


@dataclass(frozen=True)
class SumTask:
    """`A 1 B 3 C 2 <end> ...`: think the running sums A 1 B 4 C 1, answer 1."""

    digits: tuple[int, ...]
    filler: tuple[int, ...]
    """Digits after the end, which are not to be summed: short tasks are not all the same."""

    @classmethod
    def draw(cls, rng: Random, step_weights: Sequence[float] = STEP_WEIGHTS) -> Self:
        num_steps = draw_num_steps(rng, step_weights)
        drawn = rng.choices(range(SUM_MODULUS), k=BODY_WORDS - 1 - num_steps)
        return cls(tuple(drawn[:num_steps]), tuple(drawn[num_steps:]))

    @property
    def words(self) -> tuple[str, ...]:
        labelled = zip(LETTERS, map(str, self.digits), strict=False)
        return (*(word for pair in labelled for word in pair), END, *map(str, self.filler))

    @property
    def label(self) -> str:
        return str(sum(self.digits) % SUM_MODULUS)

    @property
    def metadata(self) -> dict[str, Any]:
        return {}

    def demonstrate(self, num_steps: int, error_rate: float, rng: Random) -> Demonstration:
        total, thoughts = 0, []
        for label, digit in zip(LETTERS, self.digits[:num_steps], strict=False):
            wrong = rng.random() < error_rate
            total = rng.randrange(SUM_MODULUS) if wrong else (total + digit) % SUM_MODULUS
            thoughts += (label, str(total))
        if num_steps == 0 or rng.random() < error_rate:
            total = rng.randrange(SUM_MODULUS)
        words = (*thoughts, ANSWER, str(total), EOS)
        return Demonstration(words, (True,) * len(words))


@dataclass(frozen=True)
class ChainTask:
    """The table maps a key to another key or to a digit: `<call> C` returns `F`, `<call> F` returns `4`, answer 4."""

    start: str
    table: dict[str, str]

    @classmethod
    def draw(cls, rng: Random, step_weights: Sequence[float] = STEP_WEIGHTS) -> Self:
        table = {key: rng.choice(LETTERS if rng.random() < 0.5 else DIGITS) for key in LETTERS}
        chain = rng.sample(LETTERS, draw_num_steps(rng, step_weights))
        table.update(zip(chain, [*chain[1:], rng.choice(DIGITS)], strict=True))
        return cls(chain[0], table)

    @property
    def words(self) -> tuple[str, ...]:
        return (self.start,)

    @property
    def label(self) -> str:
        value = self.start
        while value in self.table:
            value = self.table[value]
        return value

    @property
    def metadata(self) -> dict[str, Any]:
        return {"table": self.table}

    def demonstrate(self, num_steps: int, error_rate: float, rng: Random) -> Demonstration:
        value, calls = self.start, []
        while value in self.table and len(calls) < num_steps:
            key = rng.choice(LETTERS) if rng.random() < error_rate else value
            value = self.table[key]
            calls.append((CALL, key, value))
        if value in self.table or rng.random() < error_rate:
            value = rng.choice(DIGITS)
        words = (*(word for call in calls for word in call), ANSWER, value, EOS)
        return Demonstration(words, (True, True, False) * len(calls) + (True,) * 3)


@dataclass(frozen=True)
class ProgramTask:
    """`C D *3 A +1 ...`: write lines A to C of a listing that is out of order, each a label and two stack words."""

    num_lines: int
    operations: dict[str, str]
    """Operation of each label, in the order of the listing."""

    @classmethod
    def draw(cls, rng: Random, step_weights: Sequence[float] = STEP_WEIGHTS) -> Self:
        labels = rng.sample(LETTERS[: len(step_weights)], len(step_weights))
        return cls(draw_num_steps(rng, step_weights), {label: rng.choice(list(OPERATIONS)) for label in labels})

    @property
    def words(self) -> tuple[str, ...]:
        return (LETTERS[self.num_lines - 1], *(word for line in self.operations.items() for word in line))

    @property
    def label(self) -> list[list[int | None]]:
        """Test cases: [input, expected output]."""
        code = [word for label in LETTERS[: self.num_lines] for word in OPERATIONS[self.operations[label]]]
        return [[value, run_program(code, value)] for value in PROGRAM_INPUTS]

    @property
    def metadata(self) -> dict[str, Any]:
        return {}

    def demonstrate(self, num_steps: int, error_rate: float, rng: Random) -> Demonstration:
        words: list[str] = []
        for label in LETTERS[: min(num_steps, self.num_lines)]:
            wrong = rng.random() < error_rate
            operation = rng.choice(list(OPERATIONS)) if wrong else self.operations[label]
            words += (label, *OPERATIONS[operation])
        words.append(EOS)
        return Demonstration(tuple(words), (True,) * len(words))


TASKS: dict[str, type[Task]] = {"general": SumTask, "agents": ChainTask, "coding": ProgramTask}


def run_program(code: Sequence[str], value: int) -> int | None:
    """Run a stack program on a stack that holds `value`. Returns the one value left, or None for any fault."""
    stack = [value]
    for word in code:
        if word in DIGITS:
            stack.append(int(word))
        elif word == "dup":
            stack.append(stack[-1])
        elif word in ("add", "mul") and len(stack) > 1:
            right, left = stack.pop(), stack.pop()
            stack.append((left + right if word == "add" else left * right) % PROGRAM_MODULUS)
        else:
            return None
        if len(stack) > MAX_STACK:
            return None
    return stack[0] if len(stack) == 1 else None
