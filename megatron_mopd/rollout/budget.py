"""The budget of a trajectory: tau * b0(x), with tau of its cell and b0(x) of its prompt.

    budgets:
      tau: {low: 0.34, high: 0.67, max: 1.5}      or, by domain: {general: {low: ...}, coding: {low: ...}}
      start: 1.5              reinforcement learning: tau goes from here to the cell's own,
      anneal_fraction: 0.6    linearly, over this share of run.num_steps

A trajectory is within its budget if it spends at most as many tokens. A prompt without b0, and a cell without tau,
have no budget. Promises: tests/unit/test_budget.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_mopd.config import Config
from megatron_mopd.types import Cell, Prompt

DIGITS = 9
"""Of a budget: 0.29 * 100 is a float below 29, which would lose its last token."""


def final_taus(config: Config) -> dict[Cell, float]:
    """Those of the efforts themselves: what an evaluation holds a policy to."""
    taus = {cell: config.budgets.tau_of(cell) for cell in config.prompts.cells}
    return {cell: tau for cell, tau in taus.items() if tau is not None}


def taus_at(config: Config, step: int) -> dict[Cell, float]:
    """Those of a training step, from 0."""
    final, start = final_taus(config), config.budgets.start
    done = step / (config.budgets.anneal_fraction * config.run.num_steps)
    if start is None or done >= 1.0:
        return final  # and not start + (tau - start), which may be a float below: a budget would lose its last token
    return {cell: start + done * (tau - start) for cell, tau in final.items()}


def budget_tokens(prompt: Prompt, taus: Mapping[Cell, float]) -> float | None:
    tau = taus.get(prompt.cell)
    return None if tau is None or prompt.budget_tokens is None else round(tau * prompt.budget_tokens, DIGITS)
