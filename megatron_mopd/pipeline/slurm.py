"""The same graph as Slurm jobs: one `sbatch` per stage that is not done, each after the jobs of what it needs.

A job runs `mopd pipeline FILE --stage NAME`, in the folder and with the interpreter of the command that submitted it;
FOLDER must be on a file system that every node sees. What is done is not submitted; a job of this pipeline that
still waits or runs is not submitted again, and later ones depend on it. `afterok`: where a stage fails, Slurm cancels
what depends on it (--kill-on-invalid-dep).
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megatron_mopd.errors import UserError
from megatron_mopd.pipeline.graph import Pipeline, Stage
from megatron_mopd.pipeline.stamps import Stamps
from megatron_mopd.run_lock import locked
from megatron_mopd.telemetry.record import replace_file


def submit(pipeline: Pipeline, words: Sequence[str], say: Callable[[str], None]) -> int:
    """Submit what is not done. `words` are those of `mopd pipeline` that name this pipeline."""
    with locked(pipeline.folder / "pipeline"):
        stamps = Stamps(pipeline)
        done, live = stamps.done(), _live_jobs()
        jobs: dict[str, str] = {}
        for stage in pipeline.ordered:
            if stage.name in done:
                continue
            file = job_file(stamps, stage)
            known = file.read_text().strip() if file.is_file() else None
            if known in live:
                jobs[stage.name] = known
                say(f"{stage.name}: job {known} is in the queue")
                continue
            stamps.log_file(stage).parent.mkdir(parents=True, exist_ok=True)
            job = _asked(sbatch_command(pipeline, stage, words, jobs)).partition(";")[0].strip()
            jobs[stage.name] = job
            replace_file(file, job + "\n")
            say(f"{stage.name}: submitted as job {job}")
    return 0


def sbatch_command(
    pipeline: Pipeline, stage: Stage, words: Sequence[str], jobs: Mapping[str, str], folder: Path | None = None
) -> list[str]:
    """`jobs` has the job of every need that is not done; `folder` is where the job works, by default here."""
    here, log = folder or Path.cwd(), pipeline.folder / "logs" / f"{stage.name}.slurm"
    after = [jobs[need] for need in stage.needs if need in jobs]
    run = [sys.executable, "-m", "megatron_mopd.cli", "pipeline", *words, "--stage", stage.name]
    return [
        "sbatch",
        "--parsable",
        f"--job-name={stage.name}",
        f"--chdir={here}",
        f"--output={log}",
        "--open-mode=append",
        *([f"--dependency=afterok:{':'.join(after)}", "--kill-on-invalid-dep=yes"] if after else []),
        *(f"--{name}={value}" for name, value in {**pipeline.slurm, **stage.slurm}.items()),
        f"--wrap=exec {shlex.join(run)}",
    ]


def job_file(stamps: Stamps, stage: Stage) -> Path:
    return stamps.folder / f"{stage.name}.job"


def _live_jobs() -> frozenset[str]:
    """This user's jobs that wait or run."""
    return frozenset(_asked(["squeue", "--me", "--noheader", "--format=%A"]).split())


def _asked(command: list[str]) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    except OSError:
        raise UserError(
            f"{command[0]} is not on the PATH; set launcher=local, or submit from a machine that has it"
        ) from None
    if result.returncode != 0:
        raise UserError(f"{command[0]} ended with exit code {result.returncode}: {result.stderr.strip()}")
    return result.stdout
