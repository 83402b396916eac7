"""The router: one teacher per (domain, effort), named; anything else is refused.

Promise: every cell of the mixture has exactly one teacher before the first prompt is drawn, and a prompt of any
other cell raises. There is no default teacher and no averaging.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_mopd.config import Teacher
from megatron_mopd.errors import UserError
from megatron_mopd.types import Cell


class Router:
    """Maps a cell to the name of its teacher.

    Raises UserError for two teachers of one cell or name, and for a cell of the mixture without one.
    """

    def __init__(self, teachers: Sequence[Teacher], cells: Sequence[Cell]) -> None:
        self._teacher: dict[Cell, Teacher] = {}
        names: set[str] = set()
        for teacher in teachers:
            other = self._teacher.get(teacher.cell)
            if other is not None:
                raise UserError(
                    f"two teachers for {teacher.cell}: {other.name} and {teacher.name}; keep one under teachers.models"
                )
            if teacher.name in names:
                raise UserError(f"two teachers are named {teacher.name}; names under teachers.models must differ")
            self._teacher[teacher.cell] = teacher
            names.add(teacher.name)
        self._cells = tuple(cells)
        missing = [str(c) for c in cells if c not in self._teacher]
        if missing:
            raise UserError(
                f"no teacher for {', '.join(missing)}; add it under teachers.models or remove it from "
                "prompts.mixture / prompts.efforts"
            )

    def route(self, cell: Cell) -> str:
        if cell not in self._teacher:
            raise UserError(f"no teacher for {cell}; add it under teachers.models or remove its prompts")
        return self._teacher[cell].name

    def coverage(self) -> str:
        """The table that preflight prints: one line per cell with its teacher, and the teachers that no prompt
        reaches."""
        width = max(len(str(c)) for c in (*self._cells, *self._teacher))
        lines = [f"  {c!s:{width}}  {self._teacher[c].name}  {self._teacher[c].checkpoint}" for c in self._cells]
        idle = [t.name for c, t in self._teacher.items() if c not in self._cells]
        return "\n".join([*lines, *(f"  {name} is never used: its cell is not in the mixture" for name in idle)])
