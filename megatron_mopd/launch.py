"""Start the ranks of `mopd train` and `mopd serve-teacher` on this machine: torchrun's own launcher, called from Python
so that exit codes survive.

Rank 0 keeps the terminal; the output of the others goes to RUN/logs. A rank that stops with exit code 2 (bad input)
makes `mopd` stop with 2, and no banner hides its line.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from megatron_mopd.ranks import LAUNCHER


def launch(module: str, arguments: list[str], num_processes: int, run_folder: Path, *, drains: bool = False) -> int:
    """Run `python -m module arguments` on `num_processes` ranks; return the exit code of the first rank that
    failed, or 0.

    Asked to end, torchrun gives its ranks 30 s. Where the module `drains`, SIGTERM and SIGINT are passed on to its
    ranks instead, which end when they have finished what they have accepted.
    """
    for name in logging.root.manager.loggerDict:  # each has a level of its own
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    logs = run_folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ[LAUNCHER] = str(os.getpid())
    job = module.rpartition(".")[2]
    if drains:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _pass_on)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=job,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        signals_to_handle="SIGHUP,SIGQUIT" if drains else "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=dict.fromkeys(range(1, num_processes), Std.ALL)),
    )
    try:
        elastic_launch(config, sys.executable)("-m", module, *arguments)
    except ChildFailedError as error:
        failed, failure = error.get_first_failure()
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            kept = "" if drains else "; the last checkpoint is kept"
            print(f"mopd: rank {failed} was ended by {name}{kept}", file=sys.stderr, flush=True)
            return 128 - failure.exitcode
        if failed > 0:
            print(f"rank {failed}: {_last_line(logs, job, failed)}", file=sys.stderr, flush=True)
        return failure.exitcode
    except SignalException as stopped:
        return 128 + stopped.sigval
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        del os.environ[LAUNCHER]
    return 0


def _pass_on(number: int, _: object) -> None:
    """To the ranks: torchrun starts them from this thread, each in a session of its own."""
    ranks = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    if not ranks:
        raise SystemExit(128 + number)
    for pid in ranks:
        os.kill(int(pid), number)


def _last_line(logs: Path, job: str, rank: int) -> str:
    """What the rank said last in its newest log, and where the rest is."""
    log = max(logs.glob(f"{job}_*/attempt_0/{rank}/stderr.log"), key=lambda file: file.stat().st_mtime)
    lines = log.read_text(errors="replace").strip().splitlines()
    return f"{lines[-1] if lines else 'ended without a word'} (see {log})"
