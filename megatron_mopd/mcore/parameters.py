"""This rank's parameters under names that do not depend on the layout or on Transformer Engine.

The one place that knows how local and Transformer Engine names differ, and which layer and expert of the whole model a
local one is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_mopd.mcore import device  # noqa: F401
from megatron_mopd.mcore.families import Rule, family_of
from megatron_mopd.mcore.sharding import SHARDINGS, Geometry, Sharding

# isort: split
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

_TRANSFORMER_ENGINE_NAMES = (
    (r"self_attention\.linear_qkv\.layer_norm_weight$", "input_layernorm.weight"),
    (r"mlp\.linear_fc1\.layer_norm_weight$", "pre_mlp_layernorm.weight"),
    (r"mlp\.experts\.linear_fc(\d)\.weight(\d+)$", r"mlp.experts.local_experts.\2.linear_fc\1.weight"),
)
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


@dataclass(frozen=True)
class Parameter:
    """One parameter of this rank, what it is in the checkpoint, and the ranks that hold its other slices."""

    name: str
    """In the names of the local spec, layers and experts counted over the whole model."""
    tensor: Tensor
    rule: Rule
    hf_names: tuple[str, ...]
    group: ProcessGroup
    """The (expert-) tensor-parallel group."""
    owned: bool
    """Whether this rank's group is the one that exports it (the others hold the same values)."""

    @property
    def sharding(self) -> Sharding:
        return SHARDINGS[self.rule.kind]


def parameters_of(models: Sequence[GPTModel], hf_config: Mapping[str, Any]) -> list[Parameter]:
    """Every parameter of this rank's virtual stages, in a fixed order.

    Raises UserError for a parameter, or a state that is kept with the weights, that the family has no tensor for.
    """
    family = family_of(hf_config)
    dense = (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0,
    )
    expert = (
        parallel_state.get_expert_tensor_parallel_group(),
        parallel_state.get_expert_data_parallel_rank() == 0,
    )
    found = []
    for model in models:
        for local_name, tensor in [*model.named_parameters(), *persistent_buffers(model)]:
            name = global_name(model, local_name)
            rule, hf_names = family.find(name)
            group, owned = expert if _EXPERT.search(name) else dense
            assert isinstance(group, ProcessGroup)
            found.append(Parameter(name, tensor.detach(), rule, hf_names, group, owned))
    return found


def geometry_of(models: Sequence[GPTModel], hf_config: Mapping[str, Any]) -> Geometry:
    config = models[0].config
    assert config.num_query_groups is not None
    assert config.kv_channels is not None
    return Geometry(
        vocab_size=family_of(hf_config).architecture(hf_config).vocab_size,
        padded_vocab_size=models[0].vocab_size,
        num_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        head_width=config.kv_channels,
    )


def persistent_buffers(model: GPTModel) -> list[tuple[str, Tensor]]:
    """Buffers that belong to the weights, such as the router's expert bias."""
    saved = model.state_dict(keep_vars=True)
    return [(name, buffer) for name, buffer in model.named_buffers() if name in saved]


def global_name(model: GPTModel, name: str) -> str:
    """In the names of the local spec, layers and experts counted over the whole model."""
    for pattern, local in _TRANSFORMER_ENGINE_NAMES:
        name = re.sub(pattern, local, name)
    if match := _LAYER.match(name):
        local_layer: Any = model.decoder.layers[int(match[1])]
        layer = local_layer.layer_number - 1
        name = f"decoder.layers.{layer}.{name[match.end() :]}"
    if match := _EXPERT.search(name):
        num_experts = model.config.num_moe_experts
        assert num_experts is not None
        per_rank = num_experts // parallel_state.get_expert_model_parallel_world_size()
        expert = parallel_state.get_expert_model_parallel_rank() * per_rank + int(match[1])
        name = f"{name[: match.start()]}.local_experts.{expert}.{name[match.end() :]}"
    return name
