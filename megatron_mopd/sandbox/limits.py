"""What a program in a workspace may take, with the one default of each limit."""

from __future__ import annotations

from dataclasses import dataclass, fields

from megatron_mopd.errors import UserError

MAX_DEPTH = 64
"""Of folders in a workspace; each level is an open file of whoever walks it."""


@dataclass(frozen=True)
class Limits:
    timeout_s: float = 60.0
    """Wall clock of a command."""
    cpu_s: int = 60
    """CPU time of each process."""
    memory_mb: int = 1024
    """Resident memory of all processes of a command together, watched."""
    address_space_mb: int = 8192
    """Of each process."""
    disk_mb: int = 256
    """All files of a workspace together, watched; also the most of one file, which the kernel holds."""
    max_files: int = 50_000
    """Files, folders and links of a workspace, watched."""
    max_processes: int = 128
    """Processes and threads of a command."""
    open_files: int = 256
    """Of each process."""
    output_bytes: int = 1 << 16
    """What is kept of stdout, and as much of stderr."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not (whole or (field.name == "timeout_s" and isinstance(value, float))) or not 0 < value < 1 << 40:
                raise UserError(f"workspaces: {field.name}={value!r} must be a number of at least 1")

    @property
    def disk_bytes(self) -> int:
        return self.disk_mb << 20

    @property
    def memory_bytes(self) -> int:
        return self.memory_mb << 20
