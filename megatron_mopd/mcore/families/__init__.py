"""Model families: one file each, read in both directions. A new family is a new file and its line in `FAMILIES`.

Torch-free, so that the preflight answers before torch is imported.
"""

from collections.abc import Mapping
from typing import Any

from megatron_mopd.errors import UserError
from megatron_mopd.mcore.families import qwen3_moe
from megatron_mopd.mcore.families.family import Architecture, Family, Kind, Rule

__all__ = ["FAMILIES", "Architecture", "Family", "Kind", "Rule", "family_of"]

FAMILIES: dict[str, Family] = {family.model_type: family for family in (qwen3_moe.FAMILY,)}


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """The family of a config.json; UserError with the known ones where there is none."""
    model_type = hf_config.get("model_type")
    if model_type not in FAMILIES:
        raise UserError(
            f"model_type {model_type!r} of the checkpoint is not supported; supported: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]
