"""Which options go together with which objective; everything else is refused, for it would do nothing. Torch-free."""

from __future__ import annotations

from megatron_mopd.config import Advantage, Config, Demonstrations, Ratio
from megatron_mopd.errors import UserError

POLICY_GRADIENTS = ("mopd", "grpo")


def check_objective_options(config: Config) -> None:
    """Raise UserError for the first option that the objective does not use, and for the first that it lacks."""
    _check_unused(config)
    _check_ratio(config.objective.ratio)
    if config.objective.needs_outcomes:
        _check_outcomes(config)
    if config.objective.name == "sft":
        _check_demonstrations(config)


def _check_unused(config: Config) -> None:
    objective, name = config.objective, config.objective.name
    unused = (
        ("objective.beta", objective.beta != 0, name == "grpo"),
        ("objective.outcome_weight", objective.outcome_weight != 0, name == "mopd"),
        ("objective.ratio", objective.ratio.is_on, name in POLICY_GRADIENTS),
        ("objective.advantage", objective.advantage != Advantage(), objective.needs_outcomes),
        ("objective.domain_balance", objective.domain_balance != "none", objective.distils),
        ("budgets.start", config.budgets.start is not None, objective.needs_outcomes),
        ("demonstrations", config.demonstrations != Demonstrations(), name == "sft"),
        ("teachers.models", bool(config.teachers.models), objective.needs_teachers),
        ("rollout.router_replay", config.rollout.router_replay, name != "sft"),
        ("rollout.partial", config.rollout.partial.oversampling != 1, name != "sft"),
        ("rollout.engine", config.rollout.engine != "embedded", name != "sft"),
        ("prompts.samples_per_prompt", config.prompts.samples_per_prompt != 1, name != "sft"),
    )
    for option, is_set, is_used in unused:
        if is_set and not is_used:
            more = " without objective.beta" if (option, name) == ("teachers.models", "grpo") else ""
            how = ", or set teachers.models=[] over it" if option == "teachers.models" else ""
            raise UserError(f"{option} is set, and objective.name={name}{more} does not use it; remove it{how}")


def _check_ratio(ratio: Ratio) -> None:
    for device, low, high in (
        ("mask", ratio.mask_low, ratio.mask_high),
        ("truncate", ratio.truncate_low, ratio.truncate_high),
    ):
        if low is not None and high is not None and low >= high:
            raise UserError(f"objective.ratio: {device}_low={low:g} is not below {device}_high={high:g}")


def _check_outcomes(config: Config) -> None:
    """Rewards are compared within a group, all of which is in one batch."""
    because = f"objective.name={config.objective.name} compares the rewards of a prompt's samples"
    if config.prompts.samples_per_prompt == 1:
        raise UserError(f"{because}; set prompts.samples_per_prompt to 2 or more")
    if config.teachers.max_lag_steps > 0:
        raise UserError(
            f"{because}, and with teachers.max_lag_steps={config.teachers.max_lag_steps} some could come in a later "
            "step; set it to 0"
        )


def _check_demonstrations(config: Config) -> None:
    if not config.demonstrations.files:
        raise UserError("objective.name=sft learns from demonstrations; name files in demonstrations.files")
    if config.prompts.effort_variable is None and config.demonstrations.neutral_fraction:
        raise UserError(
            "demonstrations.neutral_fraction is of the prompts that name their effort, and with "
            "prompts.effort_variable=null none does; set one of them alone"
        )
