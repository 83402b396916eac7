"""From a backend's name and its options to the factory of its workspaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_mopd.errors import UserError
from megatron_mopd.protocols import WorkspaceFactory
from megatron_mopd.sandbox.bubblewrap import BubblewrapWorkspaces
from megatron_mopd.sandbox.remote import RemoteWorkspaces

NAMED: dict[str, Callable[..., WorkspaceFactory]] = {"bubblewrap": BubblewrapWorkspaces, "remote": RemoteWorkspaces}


def load_workspaces(backend: str, options: Mapping[str, Any]) -> WorkspaceFactory:
    """Raises UserError for an unknown backend and for options that it does not take."""
    if backend not in NAMED:
        raise UserError(f"no workspaces {backend!r}; name one of {', '.join(NAMED)}")
    try:
        return NAMED[backend](**options)
    except TypeError as error:
        raise UserError(f"workspaces {backend!r}: {str(error).partition('__init__() ')[2] or error}") from None
