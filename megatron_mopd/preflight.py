"""Preflight: everything that can be refused before a model is built, in the time of reading a few JSON files.

Promise: imports no torch; raises UserError for the first thing that is wrong; changes nothing.
"""

from __future__ import annotations

from megatron_mopd.config import Config
from megatron_mopd.errors import UserError
from megatron_mopd.hf_folder import read_hf_config, read_token_map
from megatron_mopd.mcore.layout import Layout
from megatron_mopd.mcore.options import check_optimizer_options, split_megatron_table
from megatron_mopd.prompts.files import read_prompts
from megatron_mopd.prompts.source import PromptSource
from megatron_mopd.rollout.environments import load_factory
from megatron_mopd.teachers.identity import check_same_language
from megatron_mopd.teachers.router import Router
from megatron_mopd.telemetry.sinks import check_sinks


def preflight(config: Config, world_size: int) -> str:
    """Check the run that `world_size` ranks would make; return the coverage table of the router."""
    if config.objective.name != "mopd":
        raise UserError(f"objective.name={config.objective.name} has no rollouts to train on; `mopd train` takes mopd")
    hf_config = read_hf_config(config.student.checkpoint, "student.checkpoint")
    read_token_map(config.student.checkpoint, "student.checkpoint")
    check_optimizer_options(split_megatron_table(config.megatron))
    Layout.from_table(config.megatron).check(hf_config, world_size)
    router = Router(config.teachers.models, config.prompts.cells)
    for i, teacher in enumerate(config.teachers.models):
        check_same_language(config.student.checkpoint, teacher.checkpoint, f"teachers.models.{i} ({teacher.name})")
    for name, environment in config.environments.items():
        load_factory(name, environment.factory)
    check_prompts(config)
    check_sinks(config.telemetry)
    return router.coverage()


def check_prompts(config: Config) -> None:
    """Every file parses, every drawn cell has prompts, every prompt's environment is configured."""
    for files in (config.prompts.files, config.prompts.eval_files):
        prompts = read_prompts(files)
        for prompt in prompts:
            if prompt.environment not in config.environments:
                raise UserError(
                    f"prompt {prompt.id} wants environment {prompt.environment!r}; add it under environments:"
                )
        if prompts:
            PromptSource(prompts, config.prompts, config.run.seed)
