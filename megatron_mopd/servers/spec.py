"""One server to start, whatever it is: how its process is made, and what is known of it before.

Torch-free. Who knows which servers a configuration needs: `wanted.py`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ServerSpec:
    """`<name>` in RUN/endpoints, `<log>` in RUN/logs."""

    name: str
    log: str
    table: str
    """Of the configuration: its options are named in messages."""
    python: Path
    module: str
    """What `python -m` would run."""
    arguments: tuple[str, ...]
    """Without host, port and key."""
    address_arguments: tuple[str, ...]
    """With {host} and {port} in them."""
    host: str
    key_variable: str | None
    """Environment variable with the key that its /ready wants."""
    takes_key_as_argument: bool
    start_timeout_s: float
    on_cpu: bool
    grace_s: float
    """How long it may take to end in order."""
    variables: tuple[tuple[str, str], ...] = ()
    """Of its environment, over those of this process."""

    @property
    def key(self) -> str | None:
        return os.environ[self.key_variable] if self.key_variable else None

    def command(self, port: int) -> tuple[str, ...]:
        """The words after the module."""
        return (*self.arguments, *(word.format(host=self.host, port=port) for word in self.address_arguments))

    def environment(self) -> dict[str, str]:
        return {**os.environ, **dict(self.variables)}
