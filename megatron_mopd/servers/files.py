"""RUN/endpoints: what the keeper says to the other processes of a run.

    <name>.json     {"url": ..., "pid": ...}: from before the first start of the server until the end of the keeper
    failure.txt     why the keeper gave up
    config.yaml     the configuration that it serves
    foreground      the keeper is a `mopd serve`, which a run uses and does not end
    .lock           held by the keeper as long as it lives

Files are written beside their place and renamed: nothing is ever half there.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from megatron_mopd.errors import UserError
from megatron_mopd.run_lock import locked

FAILURE, FOREGROUND, CONFIG = "failure.txt", "foreground", "config.yaml"


def folder(run_folder: Path) -> Path:
    return run_folder / "endpoints"


def write_endpoint(run_folder: Path, name: str, url: str, pid: int | None) -> None:
    _write(folder(run_folder) / f"{name}.json", json.dumps({"url": url, "pid": pid}))


def write_failure(run_folder: Path, reason: str) -> None:
    _write(folder(run_folder) / FAILURE, reason)


def write_config(run_folder: Path, text: str) -> None:
    _write(folder(run_folder) / CONFIG, text)


def mark_foreground(run_folder: Path) -> None:
    _write(folder(run_folder) / FOREGROUND, "")


def read_endpoint(run_folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder(run_folder) / f"{name}.json").read_text())


def read_endpoints(run_folder: Path) -> dict[str, str]:
    """Server name to URL."""
    names = sorted(file.stem for file in folder(run_folder).glob("[!.]*.json"))
    return {name: read_endpoint(run_folder, name)["url"] for name in names}


def is_served(run_folder: Path) -> bool:
    """Whether a `mopd serve` is at work."""
    return (folder(run_folder) / FOREGROUND).exists() and keeper_lives(run_folder)


def keeper_lives(run_folder: Path) -> bool:
    try:
        with locked(folder(run_folder), wait_s=0.0):
            return False
    except UserError:
        return True


def clear(run_folder: Path) -> None:
    for file in folder(run_folder).iterdir():
        if file.suffix == ".json" or file.name in (FAILURE, FOREGROUND, CONFIG):
            file.unlink()


def _write(file: Path, text: str) -> None:
    beside = file.with_name(f".{file.name}.new")
    beside.write_text(text)
    os.replace(beside, file)
