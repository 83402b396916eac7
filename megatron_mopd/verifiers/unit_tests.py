"""Unit tests: the student's program runs in a sandbox on each input of the label, and must print what is expected.

The expected output never enters the sandbox, so a program can pass only by computing it. Tests run one after the
other and end at the first that fails.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megatron_mopd.errors import UserError
from megatron_mopd.protocols import Sandbox
from megatron_mopd.sandbox.process import ProcessSandbox
from megatron_mopd.types import Prompt

FENCED = re.compile(r"```[^\n]*\n(.*?)```", re.DOTALL)


class UnitTests:
    """1.0 if the program passes every test."""

    def __init__(self, *, sandbox: Sandbox | Mapping[str, Any] | None = None) -> None:
        """Args:
        sandbox: where programs run; from a configuration, the options of a ProcessSandbox.
        """
        if sandbox is None or isinstance(sandbox, Mapping):
            try:
                sandbox = ProcessSandbox(**(sandbox or {}))
            except TypeError as error:
                raise UserError(f"unit_tests: sandbox: {error}") from None
        self._sandbox = sandbox

    def check(self, prompt: Prompt) -> None:
        tests = prompt.label
        if not isinstance(tests, list) or not tests:
            raise ValueError("it has no label: a list of [stdin, expected stdout]")
        for number, test in enumerate(tests, start=1):
            if not isinstance(test, list | tuple) or len(test) != 2:
                raise ValueError(f"test {number} of its label is {test!r}, not [stdin, expected stdout]")

    async def verify(self, prompt: Prompt, answer: str) -> float:
        program = program_of(answer)
        for stdin, expected in prompt.label:
            execution = await self._sandbox.run(program, str(stdin))
            if execution.ended != 0 or execution.stdout.split() != str(expected).split():
                return 0.0
        return 1.0


def program_of(text: str) -> str:
    """The last fenced block of an answer; the whole text if there is none."""
    blocks = FENCED.findall(text)
    return blocks[-1] if blocks else text
