"""A Hugging Face folder as a float32 model for inference in this process.

Promises (tests/contract/test_models.py): what is loaded is exactly what the folder holds (a missing, extra or misshapen
tensor is an error, never a random initialisation); the model owns its memory, so that the folder may be overwritten
afterwards; nothing is fetched from a network and no code from the folder runs.

Weights go through transformers' own loading path, which fuses per-expert tensors: 30 ms for the quickstart's student.
The experts implementation is transformers' default, grouped_mm. Decoding 864 x 1 tokens with 8 experts of width 64 took
11 ms (eager: 13 to 20 ms, batched_mm: 114 ms), prefilling 864 x 16 took 98 ms (eager: 92 to 167 ms, batched_mm: 2.6 s).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from megatron_mopd.embedded.cache import ColumnCache
from megatron_mopd.errors import UserError
from megatron_mopd.hf_folder import read_hf_config
from megatron_mopd.quantization.policy import refuse_packed

# The bar would be drawn over the live display, once per training step.
logging.disable_progress_bar()


def load_model(folder: Path) -> PreTrainedModel:
    """Return the causal language model of `folder`, in evaluation mode, without gradients.

    Raises UserError if `folder` is not a Hugging Face folder with safetensors weights that fit its config.
    """
    _check_is_checkpoint(folder)
    refuse_packed(folder, read_hf_config(folder), "checkpoint", "the embedded engine")
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=torch.float32,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"checkpoint folder {folder} cannot be loaded: {reason}") from error
    model, report = loaded
    wrong = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
    if wrong:
        raise UserError(f"the weights in {folder} do not fit its config.json: {wrong}")
    _own_memory(model)
    model.eval().requires_grad_(False)
    _check_supported(model, folder)
    return model


def _check_is_checkpoint(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is not a Hugging Face checkpoint folder: it has no config.json")
    if not any((folder / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json")):
        raise UserError(f"{folder} has no model.safetensors or model.safetensors.index.json; export the weights there")


def _own_memory(model: PreTrainedModel) -> None:
    """Copy the parameters: as loaded, most are views of the mapped file, and change when it is written again."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def _check_supported(model: PreTrainedModel, folder: Path) -> None:
    """Refuse what this backend would compute wrongly.

    Its cache keeps all keys of all layers; its scorer applies the output layer itself and knows no soft-capping.
    """
    config = model.config.to_dict()
    other = set(config.get("layer_types") or ()) - {"full_attention"}
    if other or config.get("sliding_window") is not None:
        raise UserError(
            f"{folder}: the embedded backend runs full attention only, not {sorted(other) or 'sliding windows'}"
        )
    probe = torch.tensor([[0, model.config.vocab_size - 1, 0]])
    cache = ColumnCache(1, model.config.num_hidden_layers)
    with torch.inference_mode():
        logits = model(input_ids=probe, use_cache=False).logits
        scored = output_layer(model)(hidden_states(model, probe))
        model(input_ids=probe[:, :2], cache=cache, use_cache=True)
        cache.aim(slice(None), first=0, column=2)
        decoded = model(input_ids=probe[:, 2:], position_ids=torch.tensor([[2]]), cache=cache, use_cache=True).logits
    for way, got, want in (("scored", scored, logits), ("decoded", decoded, logits[:, 2:])):
        if not torch.allclose(got, want, rtol=1e-4, atol=1e-4):
            raise UserError(f"{folder}: {type(model).__name__} is not supported: its logits differ when they are {way}")


def hidden_states(model: PreTrainedModel, token_ids_BT: torch.Tensor) -> torch.Tensor:
    """Return the final hidden states [B, T, D] of rows padded on the right; causality keeps the padding out."""
    return model.base_model(input_ids=token_ids_BT, use_cache=False).last_hidden_state


def output_layer(model: PreTrainedModel) -> torch.nn.Module:
    """The layer from hidden states to logits."""
    layer = model.get_output_embeddings()
    assert layer is not None, f"{type(model).__name__} is a causal language model without an output layer"
    return layer
