"""Secrets out of what a run publishes: the configuration in the report and in W&B.

Keys belong in the environment, but `megatron:`, `sglang:` and `environments.*.options` are free tables in which a user
can put one. Promise: a value under a key that names a secret, the password of a URL, and any text that equals a secret
of the environment are replaced.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

SECRET_NAME = re.compile(
    r"(?:^|[_\-.])(?:(?:api|access|admin|auth|private|secret)[_\-]?key|token|secret|password|passwd|credentials?|authorization)$",
    re.IGNORECASE,
)
URL_PASSWORD = re.compile(r"(?<=://)[^/@\s]+@")
REDACTED = "[redacted]"
SHORTEST_SECRET = 8
"""A shorter value of the environment (TOKEN=1) would blank out ordinary text."""


def redact(tree: Any, environment: Mapping[str, str]) -> Any:
    """The same tree of dicts, lists and values with its secrets replaced."""
    if isinstance(tree, Mapping):
        return {k: REDACTED if _is_secret(str(k), v) else redact(v, environment) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return [redact(item, environment) for item in tree]
    return _redact_text(tree, environment) if isinstance(tree, str) else tree


def _is_secret(name: str, value: Any) -> bool:
    return isinstance(value, str) and bool(value) and bool(SECRET_NAME.search(name))


def _redact_text(text: str, environment: Mapping[str, str]) -> str:
    for name, value in environment.items():
        if SECRET_NAME.search(name) and len(value) >= SHORTEST_SECRET:
            text = text.replace(value, REDACTED)
    return URL_PASSWORD.sub(f"{REDACTED}@", text)
