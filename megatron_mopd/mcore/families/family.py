"""What a model family is: how its Hugging Face config reads in Megatron's words, and which tensor is which.

A family is a small declarative file beside this one, read in both directions (loading and export), so nothing is said
twice. Torch-free: the preflight reads it before torch is imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from megatron_mopd.errors import UserError

Kind = Literal["replicated", "column", "row", "vocab", "qkv", "gated"]
"""How one Megatron tensor is made of Hugging Face tensors and cut over tensor-parallel ranks (mcore/sharding.py).

replicated  one tensor, whole on every rank
column      one tensor, cut along its first dimension (output features)
row         one tensor, cut along its second dimension (input features)
vocab       one tensor, rows padded to the padded vocabulary, then cut like `column`
qkv         q, k, v; rows regrouped as [q..q, k, v] per query group, then cut like `column`
gated       gate, up; each cut like `column`, then rank r holds [gate_r, up_r]
"""


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter, in the names of the local spec with `{layer}` and `{expert}` counted over the whole
    model, and the Hugging Face tensors it is made of."""

    megatron: str
    kind: Kind
    hf: tuple[str, ...]

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        escaped = re.escape(self.megatron)
        return re.compile(escaped.replace(r"\{layer\}", r"(?P<layer>\d+)").replace(r"\{expert\}", r"(?P<expert>\d+)"))


@dataclass(frozen=True)
class Architecture:
    """The parts of a Hugging Face config that Megatron needs, under Megatron's names."""

    vocab_size: int
    max_sequence_length: int
    rotary_base: float
    activation: Literal["silu"]
    transformer: Mapping[str, Any]
    """Fields of TransformerConfig that the checkpoint fixes: another value would make another function of it."""
    training: Mapping[str, Any]
    """Fields of TransformerConfig that the family starts from and the `megatron:` table may change."""


@dataclass(frozen=True)
class Family:
    """`architecture` raises UserError for a config that Megatron cannot follow exactly."""

    model_type: str
    architecture: Callable[[Mapping[str, Any]], Architecture]
    rules: tuple[Rule, ...]

    def find(self, megatron_name: str) -> tuple[Rule, tuple[str, ...]]:
        """The rule of a parameter (see `Rule.megatron` for its name), and the names of its Hugging Face tensors.

        Raises UserError where the family has no such parameter: the model was built with parts that it cannot export.
        """
        for rule in self.rules:
            if match := rule.pattern.fullmatch(megatron_name):
                return rule, tuple(name.format(**match.groupdict()) for name in rule.hf)
        raise UserError(
            f"a {self.model_type} checkpoint has no tensor for Megatron's {megatron_name}; "
            "remove the option under megatron: that adds it"
        )


class HfConfig:
    """Reads a config.json dict by name; a missing entry is a UserError that names it."""

    def __init__(self, values: Mapping[str, Any]):
        self.values = values

    def get(self, *names: str) -> Any:
        """The entry under the first of `names` that is present (newer and older spellings of one thing)."""
        for name in names:
            if name in self.values:
                return self.values[name]
        raise UserError(f"config.json of the checkpoint has no {' or '.join(names)}")

    def refuse_unless(self, name: str, *accepted: Any) -> None:
        """Refuse a present entry whose value is none of `accepted` (the first one is what absence means)."""
        value = self.values.get(name, accepted[0])
        if value not in accepted:
            raise UserError(f"config.json has {name}={value!r}, which is not supported; supported: {accepted[0]!r}")
