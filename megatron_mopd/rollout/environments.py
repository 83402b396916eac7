"""Environments: what answers the student between stretches of sampling, and what verifies the finished trajectory.

A user's environment is a class named in the config (`environments.<name>.factory`), see protocols.Environment;
`SingleTurn` is the simplest useful one. Torch-free.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from megatron_mopd import config
from megatron_mopd.errors import UserError
from megatron_mopd.protocols import Environment, EnvironmentFactory, Observation
from megatron_mopd.types import Outcome, Prompt, Trajectory

MakeEnvironment = Callable[[Prompt], Environment]


def load_environments(tables: Mapping[str, config.Environment], tokenizer: object) -> dict[str, MakeEnvironment]:
    """Return, for each name under `environments:`, the function that makes an environment for a prompt.

    Raises UserError, naming the config key, if a factory cannot be imported or called.
    """
    return {name: _bind(name, table, tokenizer) for name, table in tables.items()}


def _bind(name: str, table: config.Environment, tokenizer: object) -> MakeEnvironment:
    factory = load_factory(name, table.factory)
    return lambda prompt: factory(prompt, tokenizer, **table.options)


def load_factory(name: str, path: str) -> EnvironmentFactory:
    """Import `package.module:Class`, the value of `environments.<name>.factory`."""
    key = f"environments.{name}.factory"
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise UserError(f"{key}={path!r} must have the form package.module:Class")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, TypeError) as error:  # TypeError: a relative name
        raise UserError(f"{key}={path!r} cannot be imported: {error}; is its folder on PYTHONPATH?") from error
    except Exception as error:  # a user's code may raise anything
        raise UserError(f"{key}={path!r} cannot be imported: {type(error).__name__}: {error}") from error
    if attribute not in vars(module):
        raise UserError(f"{key}={path!r}: module {module_name} has no {attribute}")
    factory = vars(module)[attribute]
    if not callable(factory):
        raise UserError(f"{key}={path!r}: {attribute} is not callable")
    return cast(EnvironmentFactory, factory)


def check_options(name: str, table: config.Environment, factory: EnvironmentFactory) -> None:
    """UserError where `environments.<name>.options` are not what the factory takes."""
    try:
        inspect.signature(factory).bind(None, None, **table.options)
    except (TypeError, ValueError) as error:  # ValueError: a builtin, which no environment is
        raise UserError(f"environments.{name}.options do not fit {table.factory}: {error}") from None


class SingleTurn:
    """One answer, no observations; reward 1.0 if the text equals the prompt's label.

    `stop_tokens` are the tokens that end the answer (the tokenizer's end token by default). It spends what it samples.
    """

    def __init__(self, prompt: Prompt, tokenizer: Any, *, stop_tokens: tuple[str, ...] | list[str] = ()):
        self._prompt, self._tokenizer = prompt, tokenizer
        self.stop_token_ids = tuple(tokenizer.convert_tokens_to_ids(list(stop_tokens))) or (tokenizer.eos_token_id,)

    async def step(self, token_ids: tuple[int, ...]) -> Observation:
        return Observation((), done=True)

    async def snapshot(self) -> dict[str, Any]:
        return {}

    async def restore(self, state: dict[str, Any]) -> None:
        """There is nothing but the prompt."""

    async def score(self, trajectory: Trajectory) -> Outcome:
        answer = self._tokenizer.decode(trajectory.response_ids.tolist(), skip_special_tokens=True).strip()
        return Outcome(float(answer == str(self._prompt.label).strip()), int(trajectory.loss_mask.sum()))
