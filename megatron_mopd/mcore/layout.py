"""The parallel layout of a Megatron job, checked before torch is imported.

Sizes come from the `megatron:` table under Megatron's own names, with Megatron's defaults but one: sequence parallelism
is on wherever tensor parallelism is, because upstream refuses to train experts without it and it only saves memory
otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_mopd.errors import UserError
from megatron_mopd.mcore.families import family_of

_TP = "tensor_model_parallel_size"
_UNEVEN_STAGES = (
    "pipeline_model_parallel_layout",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel axes. The data-parallel size is what is left of the world size.

    Example: Layout.from_table({"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}).dp(world_size=4) == 2
    """

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int = 1
    cp: int = 1
    sp: bool = False
    even_stages: bool = True
    """False where the table says itself how layers are split over pipeline stages; upstream checks that."""

    @classmethod
    def from_table(cls, megatron: Mapping[str, Any]) -> Layout:
        """Read the `megatron:` config table. Raises UserError for a size that is not a positive integer."""
        tp = _size(megatron, _TP, 1)
        vpp_key = "virtual_pipeline_model_parallel_size"
        sp = megatron.get("sequence_parallel", tp > 1)
        if not isinstance(sp, bool):
            raise UserError(f"megatron.sequence_parallel={sp!r} must be true or false")
        return cls(
            tp=tp,
            pp=_size(megatron, "pipeline_model_parallel_size", 1),
            vpp=_size(megatron, vpp_key, 1) if megatron.get(vpp_key) is not None else None,
            ep=_size(megatron, "expert_model_parallel_size", 1),
            etp=_size(megatron, "expert_tensor_parallel_size", tp),
            cp=_size(megatron, "context_parallel_size", 1),
            sp=sp and tp > 1,
            even_stages=not any(megatron.get(key) for key in _UNEVEN_STAGES),
        )

    def dp(self, world_size: int) -> int:
        """Data-parallel ranks: the groups of ranks that train on different rows."""
        return world_size // (self.tp * self.pp * self.cp)

    def check(self, hf_config: Mapping[str, Any], world_size: int) -> None:
        """Raise one UserError that lists all in which the layout does not fit the model or the number of processes."""
        if problems := [*self._world_problems(world_size), *self._model_problems(hf_config)]:
            raise UserError("parallel layout: " + "; ".join(problems))

    def _world_problems(self, world_size: int) -> Iterator[str]:
        dense, expert = self.tp * self.pp * self.cp, self.etp * self.ep * self.pp
        if world_size % dense:
            yield (
                f"{world_size} processes do not divide into tensor {self.tp} x pipeline {self.pp} x context {self.cp}; "
                f"start a multiple of {dense} or lower one of megatron.*_model_parallel_size"
            )
        if world_size % expert:
            yield (
                f"{world_size} processes do not divide into expert-tensor {self.etp} x expert {self.ep} x pipeline "
                f"{self.pp}; start a multiple of {expert}, or set megatron.expert_tensor_parallel_size=1 (its default "
                "is tensor_model_parallel_size)"
            )
        if self.vpp is not None and self.pp == 1:
            yield (
                f"megatron.virtual_pipeline_model_parallel_size={self.vpp} needs pipeline_model_parallel_size of 2 or "
                "more; remove it"
            )

    def _model_problems(self, hf_config: Mapping[str, Any]) -> Iterator[str]:
        fields = family_of(hf_config).architecture(hf_config).transformer
        groups, experts = fields["num_query_groups"], fields.get("num_moe_experts")
        yield from _indivisible("attention heads", fields["num_attention_heads"], _TP, self.tp)
        if groups % self.tp and self.tp % groups:  # fewer groups than ranks: upstream gives each rank a copy
            yield from _indivisible("key-value heads", groups, _TP, self.tp)
        if 0 in fields.get("moe_layer_freq", [0]):
            yield from _indivisible("the dense MLP width", fields["ffn_hidden_size"], _TP, self.tp)
        if self.even_stages:
            stages = self.pp * (self.vpp or 1)
            yield from _indivisible("layers", fields["num_layers"], "pipeline_model_parallel_size (x virtual)", stages)
        if experts is None:
            if self.ep > 1:
                yield f"megatron.expert_model_parallel_size={self.ep}, but the model has no experts; set it to 1"
            return
        yield from _indivisible("experts", experts, "expert_model_parallel_size", self.ep)
        yield from _indivisible(
            "the expert width", fields["moe_ffn_hidden_size"], "expert_tensor_parallel_size", self.etp
        )
        if self.tp > 1 and not self.sp:
            yield (f"experts with {_TP}={self.tp} need sequence parallelism; remove megatron.sequence_parallel=false")


def _size(megatron: Mapping[str, Any], name: str, default: int) -> int:
    value = megatron.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"megatron.{name}={value!r} must be a positive integer")
    return value


def _indivisible(what: str, number: int, option: str, size: int) -> Iterator[str]:
    if number % size:
        yield f"{what} ({number}) cannot be split over megatron.{option} = {size}; choose a divisor of {number}"
