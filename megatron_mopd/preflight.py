"""Preflight: everything that can be refused before a model is built, in the time of reading a few files.

`mopd preflight` goes on with what only running servers and models can show (origin_gate.py), `mopd train` shows it in
its first batch. Promise: imports no torch; raises UserError for the first thing that is wrong; changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_mopd.config import Config, check_domains
from megatron_mopd.errors import UserError
from megatron_mopd.hf_folder import check_weight_files, read_hf_config, read_token_map
from megatron_mopd.mcore.families import family_of
from megatron_mopd.mcore.gpu_options import check_here
from megatron_mopd.mcore.layout import Layout
from megatron_mopd.mcore.options import (
    MegatronTable,
    check_optimizer_options,
    check_router_replay,
    check_schedule,
    split_megatron_table,
)
from megatron_mopd.objective_options import check_objective_options
from megatron_mopd.prompts.demonstrations import read_demonstrations
from megatron_mopd.prompts.files import read_prompts, task_of
from megatron_mopd.prompts.source import PromptSource
from megatron_mopd.prompts.xtml import check_xtml
from megatron_mopd.protocols import PromptChecker, Resumable
from megatron_mopd.quantization.policy import check_quantization, refuse_packed
from megatron_mopd.resume import check_resume, read_facts
from megatron_mopd.rollout.environments import check_options, load_factory
from megatron_mopd.servers.wanted import check_servers, server_lines
from megatron_mopd.teachers.identity import check_same_language
from megatron_mopd.teachers.router import Router
from megatron_mopd.telemetry.sinks import check_sinks
from megatron_mopd.types import Prompt


def preflight(config: Config, world_size: int) -> str:
    """Check the run that `world_size` ranks would make; return the coverage table of the router, and what is
    continued."""
    check_objective_options(config)
    hf_config = read_hf_config(config.student.checkpoint, "student.checkpoint")
    check_student(config.student.checkpoint, hf_config)
    check_template(config)
    check_run_folder(config.run.folder)
    table = split_megatron_table(config.megatron)
    check_optimizer_options(table)
    check_here(config.megatron)
    check_schedule(table, config.run.num_steps)
    layout = Layout.from_table(config.megatron)
    layout.check(hf_config, world_size)
    transformer = family_of(hf_config).architecture(hf_config).transformer
    check_quantization(config.quantization, transformer, layout.etp, config.megatron)
    coverage = f"cells: {', '.join(map(str, config.prompts.cells))}"
    if config.objective.needs_teachers:
        coverage = Router(config.teachers.models, config.prompts.cells).coverage()
    padding = check_teachers(config)
    check_objective(config, hf_config)
    check_environments(config)
    check_rollout(config, table, hf_config)
    check_prompts(config)
    check_domains(config)
    check_sinks(config.telemetry)
    return "\n".join(filter(None, (coverage, *padding, *server_lines(config), check_resume(config, world_size))))


def check_before_sampling(config: Config) -> None:
    """Where nothing is trained: `mopd budgets` and `mopd sample-teachers`."""
    hf_config = read_hf_config(config.student.checkpoint, "student.checkpoint")
    check_student(config.student.checkpoint, hf_config)
    check_template(config)
    check_run_folder(config.run.folder)
    check_environments(config)
    for files in (config.prompts.files, config.prompts.eval_files):
        check_environments_of(read_prompts(files), config)


def check_environments(config: Config) -> None:
    for name, environment in config.environments.items():
        check_options(name, environment, load_factory(name, environment.factory))


def check_environments_of(prompts: Sequence[Prompt], config: Config) -> None:
    """There is one for every prompt, and it finds in the prompt what it needs."""
    factories = {name: load_factory(name, table.factory) for name, table in config.environments.items()}
    checkers = {name: factory for name, factory in factories.items() if isinstance(factory, PromptChecker)}
    for prompt in prompts:
        if prompt.environment not in config.environments:
            raise UserError(f"prompt {prompt.id} wants environment {prompt.environment!r}; add it under environments:")
        if prompt.environment in checkers:
            _ask(checkers[prompt.environment], prompt, config.environments[prompt.environment].options)


def _ask(checker: PromptChecker, prompt: Prompt, options: Mapping[str, Any]) -> None:
    try:
        checker.check_prompt(prompt, **options)
    except UserError:
        raise
    except Exception as error:  # a user's code may raise anything
        raise UserError(
            f"environment {prompt.environment!r} cannot check prompt {prompt.id}: {type(error).__name__}: {error}"
        ) from error


def check_student(folder: Path, hf_config: Mapping[str, Any]) -> None:
    """Every id of its tokenizer is one of the model's, and its weights are whole."""
    highest = max(read_token_map(folder, "student.checkpoint"), default=0)
    if highest >= hf_config["vocab_size"]:
        raise UserError(
            f"student.checkpoint: {folder}/tokenizer.json has ids up to {highest}, vocab_size is "
            f"{hf_config['vocab_size']}; use the tokenizer of this model"
        )
    check_weight_files(folder, "student.checkpoint")
    refuse_packed(folder, hf_config, "student.checkpoint")


def check_template(config: Config) -> None:
    """It can say the effort, and keeps what was said if that is asked for."""
    check_xtml(config)
    if config.prompts.keep_thinking:  # it takes the tokenizer to tell
        from megatron_mopd.rollout.thinking import check_student_thinking

        check_student_thinking(config)


def check_teachers(config: Config) -> list[str]:
    """Each speaks the student's language and its weights are whole; what to say of their padding rows."""
    said = []
    for i, teacher in enumerate(config.teachers.models):
        key = f"teachers.models.{i} ({teacher.name})"
        said.append(check_same_language(config.student.checkpoint, teacher.checkpoint, key))
        check_weight_files(teacher.checkpoint, key)
        backend = teacher.backend or config.teachers.backend
        if teacher.megatron_checkpoint is None:
            if backend != "sglang":
                refuse_packed(teacher.checkpoint, read_hf_config(teacher.checkpoint, key), key, f"backend {backend}")
            continue
        if backend != "megatron":
            raise UserError(
                f"{key}: the {backend} backend reads no megatron_checkpoint; set backend: megatron, or export its "
                "weights to a Hugging Face folder"
            )
        read_facts(teacher.megatron_checkpoint)
    names = [teacher.name for teacher in config.teachers.models]
    if unknown := [name for name in config.teachers.other_origin if name not in names]:
        raise UserError(
            f"teachers.other_origin: no teacher is named {unknown[0]}; known: {', '.join(names) or 'none'}; correct or "
            "remove it"
        )
    return said


def check_sampled_teachers(config: Config) -> None:
    """An engine that loads Hugging Face folders is to sample them."""
    if in_megatron := [t for t in config.teachers.models if t.megatron_checkpoint is not None]:
        raise UserError(
            f"teacher {in_megatron[0].name}: teachers are sampled from Hugging Face folders, and its weights are in "
            f"{in_megatron[0].megatron_checkpoint}; name a folder with its weights as checkpoint, without "
            "megatron_checkpoint"
        )
    for teacher in config.teachers.models:
        key = f"teacher {teacher.name}"
        refuse_packed(teacher.checkpoint, read_hf_config(teacher.checkpoint, key), key, "an engine that samples many")


def check_objective(config: Config, hf_config: Mapping[str, Any]) -> None:
    """Distributions are compared where the teachers' hidden states can be had, over one vocabulary."""
    if not config.objective.needs_hidden:
        return
    asked, student_rows = f"objective.name={config.objective.name}", hf_config["vocab_size"]
    if others := config.teachers.backends - {"megatron"}:
        raise UserError(
            f"{asked} needs the teachers' hidden states, which the {min(others)} backend does not give; set "
            "teachers.backend=megatron"
        )
    for teacher in config.teachers.models:
        if (rows := read_hf_config(teacher.checkpoint, f"teacher {teacher.name}")["vocab_size"]) != student_rows:
            raise UserError(
                f"{asked} compares distributions over one vocabulary: teacher {teacher.name} has {rows} rows, the "
                f"student {student_rows}; set objective.name=mopd"
            )
    if config.objective.name == "topk" and config.objective.top_k > student_rows:
        raise UserError(
            f"objective.top_k={config.objective.top_k} is more than the vocabulary ({student_rows}); lower it, or set "
            "objective.name=full_kl"
        )


def check_run_folder(folder: Path) -> None:
    """The folder, or what exists of the way to it, can be written to."""
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        reason = "cannot be written to" if nearest.is_dir() else "is not a folder"
        raise UserError(f"run.folder={folder}: {nearest} {reason}; choose another run.folder")


def check_rollout(config: Config, table: MegatronTable, hf_config: Mapping[str, Any]) -> None:
    """Teachers score the distribution that is sampled, on servers that can; router replay has routes to replay, and
    routers that ask for them."""
    if config.teachers.on("sglang") and config.rollout.temperature != 1:
        raise UserError(
            f"rollout.temperature={config.rollout.temperature:g}: SGLang scores at temperature 1; set "
            "rollout.temperature=1, or another backend for the teachers on it"
        )
    if config.sglang.weight_transport == "distributed" and config.rollout.engine != "sglang":
        raise UserError(
            f"sglang.weight_transport=distributed: the {config.rollout.engine} engine reads its weights from a folder; "
            "set rollout.engine=sglang, or remove the option"
        )
    check_servers(config)
    check_partial(config)
    if not config.rollout.router_replay:
        return
    if config.rollout.engine != "sglang":
        raise UserError(
            f"rollout.router_replay: the {config.rollout.engine} engine records no routes; set rollout.engine=sglang"
        )
    check_router_replay(table, hf_config)


def check_partial(config: Config) -> None:
    """Nothing has to grow too old, and every environment can be left and taken up again."""
    partial = config.rollout.partial
    if partial.oversampling > 1 + partial.max_staleness:
        raise UserError(
            f"rollout.partial.oversampling={partial.oversampling:g} leaves prompts for {partial.oversampling - 1:g} "
            f"steps, and max_staleness={partial.max_staleness} allows fewer; raise it, or lower oversampling"
        )
    if partial.oversampling == 1:
        return
    for name, table in config.environments.items():
        factory = load_factory(name, table.factory)
        if isinstance(factory, type) and not issubclass(factory, Resumable):
            raise UserError(
                f"environments.{name}.factory={table.factory!r} has no snapshot and restore (protocols.Resumable), so "
                "its trajectories cannot be interrupted; add them, or set rollout.partial.oversampling=1"
            )


def check_prompts(config: Config) -> None:
    """Every file parses, every drawn cell has prompts, every prompt's environment is configured, and so are budgets."""
    if config.objective.name == "sft":
        demonstrations = read_demonstrations(config.demonstrations.files)
        PromptSource(demonstrations, config.prompts, config.run.seed, "demonstration")
        return
    if not config.prompts.files:
        raise UserError("prompts.files is empty; name files with prompts")
    training, evaluation = read_prompts(config.prompts.files), read_prompts(config.prompts.eval_files)
    for files, prompts in ((config.prompts.files, training), (config.prompts.eval_files, evaluation)):
        check_environments_of(prompts, config)
        if files:
            PromptSource(prompts, config.prompts, config.run.seed)
            check_budgets(config, prompts)
    check_held_out(training, evaluation)


def check_held_out(training: Sequence[Prompt], evaluation: Sequence[Prompt]) -> None:
    """No task of an evaluation is trained on, whatever it is called there."""
    held_out = {task_of(prompt): prompt.id for prompt in evaluation}
    for prompt in training if held_out else ():
        if (found := held_out.get(task_of(prompt))) is not None:
            raise UserError(
                f"prompt {found} of prompts.eval_files is prompt {prompt.id} of prompts.files; evaluate on prompts "
                "that are not trained on"
            )


def check_budgets(config: Config, prompts: Sequence[Prompt]) -> None:
    """Every cell has a tau, and prompts have what it is multiplied with."""
    budgets = config.budgets
    if budgets.start is not None and not budgets.tau:
        raise UserError(f"budgets.start={budgets.start:g} leads nowhere; set budgets.tau, or remove it")
    if not budgets.tau:
        return
    taus = {cell: budgets.tau_of(cell) for cell in config.prompts.cells}
    if without := [str(cell) for cell, tau in taus.items() if tau is None]:
        raise UserError(f"budgets.tau has nothing for {', '.join(without)}; add it, or take them out of the mixture")
    if config.prompts.effort_variable is None and len(set(taus.values())) > 1 and len(config.prompts.efforts) > 1:
        raise UserError(
            f"prompts.effort_variable=null: a prompt would have the budgets of {', '.join(config.prompts.efforts)}, "
            "which the student cannot tell apart; train one effort, with prompts.efforts={...: 1} on the command line "
            "(files add to the efforts of those before them)"
        )
    for cell, tau in taus.items():
        if budgets.start is not None and tau is not None and budgets.start < tau:
            raise UserError(
                f"budgets.start={budgets.start:g} is below budgets.tau of {cell}, {tau:g}, and tau falls from one to "
                "the other; raise it to that of the level before, or remove it"
            )
    bare = [prompt.id for prompt in prompts if prompt.budget_tokens is None]
    if bare and (budgets.start is not None or len(bare) == len(prompts)):
        raise UserError(
            f"budgets.{'tau' if budgets.start is None else 'start'} is set, and prompt {bare[0]} has no budget_tokens; "
            "write new files with `mopd budgets`, or remove the option"
        )
