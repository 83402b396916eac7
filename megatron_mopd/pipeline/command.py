"""The words of `mopd pipeline`.

mopd pipeline FILE [a.b=c ...]            make what is not done, print the table
mopd pipeline FILE [a.b=c ...] --status   print the table alone
mopd pipeline FILE [a.b=c ...] --stage NAME   make this one stage, whose needs are done
"""

from __future__ import annotations

import time
from pathlib import Path

from megatron_mopd.config import split_arguments
from megatron_mopd.errors import UserError
from megatron_mopd.pipeline import local, slurm
from megatron_mopd.pipeline.graph import load_pipeline
from megatron_mopd.pipeline.stage import run_stage

USAGE = "usage: mopd pipeline FILE [a.b=c ...] [--status | --stage NAME]"


def run_command(words: list[str]) -> int:
    words, show, name = _options(words)
    files, overrides = split_arguments(words)
    if len(files) != 1 or files[0].startswith("-"):
        raise UserError(USAGE)
    pipeline = load_pipeline(Path(files[0]), overrides)
    if name is not None:
        return run_stage(pipeline, pipeline.stage(name))
    if not show and pipeline.launcher == "slurm":
        return slurm.submit(pipeline, words, _say)
    code = 0 if show else local.run_here(pipeline, words, _say)
    from rich.console import Console  # not before: a stage does not need it

    from megatron_mopd.pipeline.table import print_status

    print_status(pipeline, Console())
    return code


def _options(words: list[str]) -> tuple[list[str], bool, str | None]:
    """The other words, whether --status is among them, the name after --stage."""
    rest, name = [word for word in words if word != "--status"], None
    if "--stage" in rest:
        at = rest.index("--stage")
        if at + 1 == len(rest):
            raise UserError(USAGE)
        name = rest[at + 1]
        del rest[at : at + 2]
    return rest, "--status" in words, name


def _say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", flush=True)
