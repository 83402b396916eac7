"""The words of a command, as a student may have written them: anything."""

from __future__ import annotations

from collections.abc import Sequence

WORD_BYTES, COMMAND_BYTES = 128 << 10, 1 << 20
"""The kernel's limit on a word, and less than its limit on all of them."""


def encoded(command: Sequence[str]) -> list[bytes]:
    """Raises ValueError for what no program can be started with."""
    if isinstance(command, str) or not command or not all(isinstance(word, str) for word in command):
        raise ValueError("a command is a list of texts, the first of them a program")
    words = [word.encode() for word in command]
    if any(b"\0" in word for word in words):
        raise ValueError("a word of the command has a zero byte")
    if max(map(len, words)) >= WORD_BYTES or sum(map(len, words)) > COMMAND_BYTES:
        raise ValueError("the command is too long; give it what is large as its standard input")
    return words
