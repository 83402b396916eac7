"""The `mopd` command.

    mopd train CONFIG [a.b=c ...]       train on this machine (launch.num_processes ranks)
    mopd preflight CONFIG [a.b=c ...]   refuse what would go wrong later, print the initial KL of every teacher
                                        (--static: read files only, start and sample nothing)
    mopd eval CONFIG [a.b=c ...]        score SFT policy, teachers and RUN/student in every cell: RUN/summary.json
    mopd eval-table RUN [RUN ...]       the evaluations of runs that differ in their seed as one table;
                                        NAME=RUN[,RUN ...] [...]: a line per name; --out FILE.json or FILE.md writes it
    mopd report RUN                     write RUN/report.html
    mopd pipeline FILE [a.b=c ...]      run the stages of a YAML graph that are not done (--status: say which those are;
                                        --stage NAME: run that one alone)
    mopd budgets CONFIG [a.b=c ...]     measure what each prompt takes (b0) on student.checkpoint: RUN/prompts
    mopd sample-teachers CONFIG [...]   what the teachers answer, as demonstrations: RUN/samples
    mopd serve CONFIG [a.b=c ...]       keep the run's servers until Ctrl-C; `mopd train` then uses them
    mopd serve-teacher CONFIG [...]     serve the teachers on the backend megatron (service.num_processes ranks) until
                                        Ctrl-C; other runs then name its URL in service.urls
    mopd gateway CONFIG [a.b=c ...]     the student behind an OpenAI-compatible endpoint until Ctrl-C; what harnesses
                                        play with it goes to RUN/gateway
    mopd doctor [CONFIG ...]            which parts are installed here, and what brings the others

CONFIG is one YAML file or more, later ones overlaying earlier ones; --print-config prints the resolved tree and stops.
Bad input is one line and exit code 2.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from megatron_mopd.config import Config, load_config, split_arguments
from megatron_mopd.errors import UserError
from megatron_mopd.ranks import end_with_launcher, rank

OTHER_RANKS_WAIT_S = 3.0
STATIC = "--static"


def main(arguments: list[str] | None = None) -> None:
    words = sys.argv[1:] if arguments is None else arguments
    sys.exit(guarded(lambda: _dispatch(words)))


def guarded(command: Callable[[], int | None], rank: int = 0) -> int:
    """Run a command; a UserError becomes one line on stderr and exit code 2, Ctrl-C exit code 130.

    Most mistakes stop every rank of a job at once. Rank 0 says so; the others wait until the launcher has ended
    them, and speak only if rank 0 had nothing to say.
    """
    try:
        return command() or 0
    except UserError as error:
        line, code = f"error: {error}", 2
    except KeyboardInterrupt:
        line, code = "interrupted; the same command continues from the last checkpoint, if there is one", 130
    except SystemExit:  # rank 0 has failed, and says why
        time.sleep(OTHER_RANKS_WAIT_S)
        raise
    if rank > 0:
        time.sleep(OTHER_RANKS_WAIT_S)
    print(f"mopd: {line}", file=sys.stderr, flush=True)
    return code


def run_rank(work: Callable[[Config], object]) -> NoReturn:
    """The whole of a rank's process: `work` on the configuration that its command line names."""

    def command() -> None:
        config = read_config(sys.argv[1:])
        if config is not None:
            work(config)

    end_with_launcher()
    code = guarded(command, rank())
    sys.stdout.flush()
    os._exit(code)  # the other ranks may be gone: no collective, no worker thread may hold the exit


def read_config(words: list[str]) -> Config | None:
    """The configuration that the words name; None if they ask only to print it."""
    words, show = [w for w in words if w != "--print-config"], "--print-config" in words
    unknown = [w for w in words if w.startswith("-")]
    if unknown:
        raise UserError(f"unknown option {unknown[0]}; options are written a.b=c")
    files, overrides = split_arguments(words)
    if not files:
        raise UserError("name a config file")
    config = load_config(files, overrides)
    if show:
        print(config.dump(), end="")
    return None if show else config


def _dispatch(words: list[str]) -> int | None:
    if not words or words[0] == "help" or {"-h", "--help"} & set(words):
        print(__doc__)
        return None
    name, rest = words[0], words[1:]
    without_config = {"report": _report, "doctor": _doctor, "pipeline": _pipeline, "eval-table": _eval_table}
    if name in without_config:
        return without_config[name](rest)
    commands = {
        "train": _train,
        "preflight": _preflight,
        "eval": _eval,
        "budgets": _budgets,
        "sample-teachers": _sample_teachers,
        "serve": _serve,
        "serve-teacher": _serve_teacher,
        "gateway": _gateway,
    }
    if name not in commands:
        raise UserError(f"unknown command {name!r}; known: {', '.join([*commands, *without_config])}")
    config = read_config([word for word in rest if name != "preflight" or word != STATIC])
    return None if config is None else commands[name](config, rest)


def _train(config: Config, words: list[str]) -> int:
    from megatron_mopd.preflight import preflight

    print(preflight(config, config.launch.num_processes), flush=True)
    from megatron_mopd.launch import launch

    return launch("megatron_mopd.train", words, config.launch.num_processes, config.run.folder)


def _preflight(config: Config, words: list[str]) -> None:
    from megatron_mopd.preflight import preflight

    print(preflight(config, config.launch.num_processes), flush=True)
    if STATIC not in words:
        from megatron_mopd.origin_gate import hold_gate

        hold_gate(config)


def _eval(config: Config, words: list[str]) -> None:
    from megatron_mopd.evaluate import evaluate_run

    evaluate_run(config)


def _budgets(config: Config, words: list[str]) -> None:
    from megatron_mopd.preflight import check_before_sampling

    check_before_sampling(config)
    from megatron_mopd.budgets import summary_lines, write_budgets

    print("\n".join(summary_lines(write_budgets(config))))
    print(f"{config.run.folder}/prompts holds the prompts with their budget_tokens")


def _sample_teachers(config: Config, words: list[str]) -> None:
    from megatron_mopd.preflight import check_before_sampling, check_prompts, check_sampled_teachers

    check_before_sampling(config)
    check_prompts(config)
    check_sampled_teachers(config)
    from megatron_mopd.teacher_samples import write_samples

    print("\n".join(map(str, write_samples(config))))


def _serve(config: Config, words: list[str]) -> int:
    from megatron_mopd.preflight import check_run_folder

    check_run_folder(config.run.folder)
    from megatron_mopd import build

    return build.serve(config)


def _serve_teacher(config: Config, words: list[str]) -> int:
    from megatron_mopd.preflight import check_run_folder
    from megatron_mopd.service.arguments import check_port, check_served

    check_run_folder(config.run.folder)
    check_served(config)
    check_port(config)
    from megatron_mopd.launch import launch

    table = config.service
    return launch("megatron_mopd.mcore.serve_teacher", words, table.num_processes, config.run.folder, drains=True)


def _gateway(config: Config, words: list[str]) -> None:
    from megatron_mopd.preflight import check_before_sampling

    check_before_sampling(config)
    from megatron_mopd.serve_student import serve_student

    serve_student(config)


def _pipeline(words: list[str]) -> int:
    from megatron_mopd.pipeline.command import run_command

    return run_command(words)


def _eval_table(words: list[str]) -> None:
    from megatron_mopd.telemetry.eval_table import run_command

    run_command(words)


def _doctor(words: list[str]) -> None:
    from megatron_mopd.doctor import diagnosis

    config = read_config(words) if words else None
    print(diagnosis(config.sglang.python if config else None))


def _report(words: list[str]) -> None:
    if len(words) != 1:
        raise UserError("usage: mopd report RUN_FOLDER")
    from megatron_mopd.telemetry.report import write_report

    print(write_report(Path(words[0])))


if __name__ == "__main__":
    main()
