"""From names to verifiers, and the one way to ask them: what goes wrong names the verifier and the prompt.

Promises (tests/unit/test_verifiers.py): a prompt without the label that its verifier needs is refused before anything
is sampled for it; a verifier that raises, whenever it does, or whose reward is no finite number, ends the run with a
line that names it.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Mapping
from functools import lru_cache
from numbers import Real
from typing import Any

from megatron_mopd.errors import UserError
from megatron_mopd.protocols import Verifier
from megatron_mopd.types import Prompt
from megatron_mopd.verifiers.answer import AnswerMatch
from megatron_mopd.verifiers.state import StateCheck
from megatron_mopd.verifiers.unit_tests import UnitTests

NAMED: dict[str, type] = {"answer_match": AnswerMatch, "unit_tests": UnitTests, "state_check": StateCheck}
KNOWN = f"name one of {', '.join(NAMED)}, or a class as package.module:Class"


class VerifierFailed(UserError):
    """A verifier, or the label that it was given, is at fault."""


def load_verifier(name: str, options: Mapping[str, Any]) -> Verifier:
    """One verifier for each name and options in this process. Raises UserError for what is no verifier."""
    if not isinstance(name, str):
        raise UserError(f"verifier: {name!r} is no name; {KNOWN}")
    try:
        return _loaded(name, json.dumps(options, sort_keys=True))
    except TypeError as error:
        raise UserError(f"verifier {name!r} does not take its options: {error}") from None


@lru_cache(maxsize=64)
def _loaded(name: str, options: str) -> Verifier:
    factory = NAMED.get(name) or _imported(name)
    try:
        verifier = factory(**json.loads(options))
    except (TypeError, UserError):
        raise
    except Exception as error:  # a user's code may raise anything, here and below; the run ends with this line
        raise UserError(f"verifier {name!r} cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(verifier, Verifier):
        raise UserError(f"verifier {name!r} needs the methods check and verify, see protocols.Verifier")
    return verifier


def _imported(path: str) -> Any:
    module_name, _, attribute = path.partition(":")
    if not attribute:
        raise UserError(f"no verifier {path!r}; {KNOWN}")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, TypeError, AttributeError) as error:
        raise UserError(f"verifier {path!r} cannot be imported: {error}; is its folder on PYTHONPATH?") from error
    except Exception as error:
        raise UserError(f"verifier {path!r} cannot be imported: {type(error).__name__}: {error}") from error


def check(name: str, verifier: Verifier, prompt: Prompt) -> None:
    """UserError where the prompt lacks what the verifier compares with."""
    try:
        verifier.check(prompt)
    except Exception as error:
        what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise VerifierFailed(f"prompt {prompt.id} cannot be judged by verifier {name!r}: {what}") from error


async def judge(name: str, verifier: Verifier, prompt: Prompt, answer: Any) -> float:
    """The verifier's reward."""
    try:
        reward = await verifier.verify(prompt, answer)
    except (Exception, SystemExit) as error:
        raise VerifierFailed(
            f"verifier {name!r} failed on prompt {prompt.id}: {type(error).__name__}: {error}"
        ) from error
    if isinstance(reward, bool) or not isinstance(reward, Real) or not math.isfinite(reward):
        raise VerifierFailed(f"verifier {name!r} gave prompt {prompt.id} the reward {reward!r}, not a finite number")
    return float(reward)
