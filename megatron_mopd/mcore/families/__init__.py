"""Model families: one file each, read in both directions. A new family is a new file and its line in `FAMILIES`.

Torch-free, so that the preflight answers before torch is imported.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_mopd.errors import UserError
from megatron_mopd.mcore.families import qwen3_moe
from megatron_mopd.mcore.families.family import Architecture, Family, Kind, Rule

__all__ = ["FAMILIES", "Architecture", "Family", "Kind", "Rule", "family_of", "read_hf_config"]

FAMILIES: dict[str, Family] = {family.model_type: family for family in (qwen3_moe.FAMILY,)}


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """The family of a config.json; UserError with the known ones where there is none."""
    model_type = hf_config.get("model_type")
    if model_type not in FAMILIES:
        raise UserError(
            f"model_type {model_type!r} of the checkpoint is not supported; supported: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]


def read_hf_config(folder: Path) -> dict[str, Any]:
    """config.json of a Hugging Face checkpoint folder; UserError where the folder is not one."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"checkpoint folder {folder} does not exist")
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is not a Hugging Face checkpoint: it has no config.json")
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"{folder} is not a Hugging Face checkpoint: it has no *.safetensors file")
    try:
        config = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise UserError(f"{folder / 'config.json'} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{folder / 'config.json'} must hold a JSON object")
    return config
