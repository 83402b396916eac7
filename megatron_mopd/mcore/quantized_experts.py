"""Routed experts of Megatron's models whose forward pass has the weights that the rollout engine has.

The weight itself stays a parameter of its dtype, which the optimizer updates; each forward pass multiplies with its
value on the grid of MXFP4, made once per schedule. What is exported or sent to servers is that value (`value_of`, by
mcore/stream.py): made from the same weight by the same function, so both sides have the same bits.

A grouped layer of Transformer Engine is asked for its weights by `_get_weight_tensors`; a local layer multiplies in
`_forward_impl`. A quantized weight carries `main_grad` of the weight, where Transformer Engine adds the gradient, but
not `grad_added_to_main_grad`, or DDP would take a gradient that nobody wrote.

Promises (tests/distributed/test_quantized_experts.py): exported values are those of the forward pass, bit for bit, in
every layout; nothing but routed experts changes; gradients are those of the quantized model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mopd.config import Quantization
from megatron_mopd.errors import UserError
from megatron_mopd.mcore import device
from megatron_mopd.mcore.parameters import Parameter, global_name
from megatron_mopd.quantization.fake_quant import straight_through
from megatron_mopd.quantization.formats import BLOCK, Rule, decode_mxfp4, encode_mxfp4, fake_quantize
from megatron_mopd.quantization.policy import is_quantized
from megatron_mopd.step_metrics import QuantizationMetrics

# isort: split
from megatron.core.models.gpt import GPTModel


class QuantizedExperts:
    """Of this rank. Without quantization there are none, and every method does nothing."""

    def __init__(self, models: Sequence[GPTModel], options: Quantization) -> None:
        self.rule: Rule = options.rule
        self.num_layers = 0
        self._weights: dict[str, Tensor] = {}
        """By global name."""
        self._values: dict[Tensor, Tensor] = {}
        if options.experts == "none":
            return
        self.num_layers = models[0].config.num_layers
        for model in models:
            named = {global_name(model, name): weight for name, weight in model.named_parameters()}
            self._weights |= {name: weight for name, weight in named.items() if is_quantized(name)}
        mine = set(self._weights.values())
        for model in models:
            for module in model.modules():
                if mine.intersection(module.parameters(recurse=False)):
                    self._install(module)

    def forget(self) -> None:
        """The weights may have changed: call before each schedule."""
        self._values.clear()

    def check_used(self) -> None:
        """After a schedule: the layers have asked for all of these weights. One that another version of Megatron or
        Transformer Engine multiplies with in another way would be trained as it is, and served quantized."""
        unused = [name for name, weight in self._weights.items() if weight not in self._values]
        assert not unused, f"{unused[0]} was multiplied without being quantized"

    def value_of(self, parameter: Parameter) -> Tensor:
        """What is served of a parameter."""
        return fake_quantize(parameter.tensor, self.rule) if parameter.name in self._weights else parameter.tensor

    def _install(self, module: Any) -> None:
        if hasattr(module, "_get_weight_tensors"):
            module._get_weight_tensors = self._of_grouped(module._get_weight_tensors)
        else:
            module._forward_impl = self._of_local(module._forward_impl)

    def _of_local(self, multiply: Callable[..., Tensor]) -> Callable[..., Tensor]:
        # Upstream calls it by keyword.
        return lambda *args, weight, **kwargs: multiply(*args, weight=self._on_grid(weight), **kwargs)

    def _of_grouped(self, weights: Callable[[], Iterable[Tensor]]) -> Callable[[], list[Tensor]]:
        return lambda: [self._on_grid(weight) for weight in weights()]

    def _on_grid(self, weight: Tensor) -> Tensor:
        if weight not in self._values:
            self._values[weight] = fake_quantize(weight.detach(), self.rule)
        quantized = straight_through(weight, self._values[weight])
        # Transformer Engine, which adds there itself, then hands back nothing; autograd makes zeros of that, DDP's hook
        # fires, and nothing is counted twice.
        if hasattr(weight, "main_grad"):
            quantized.main_grad = weight.main_grad  # pyright: ignore[reportAttributeAccessIssue]
        return quantized

    @torch.no_grad()
    def measure(self) -> QuantizationMetrics | None:
        """After an update, against the weights that it has updated. Collective; None without quantized experts."""
        if self.num_layers == 0:
            return None
        sums = torch.zeros(self.num_layers, _NUM_SUMS, dtype=torch.float64)
        for name, weight in self._weights.items():
            sums[_layer_of(name)] += _sums(weight.detach(), self._values.get(weight), self.rule)
        return _metrics(_over_ranks(sums))


@torch.no_grad()
def put_on_grid(models: Sequence[GPTModel], rule: Rule) -> None:
    """Weights that are never updated take the values that are served. Raises UserError where a rank has part of a
    block."""
    for model in models:
        for name, weight in model.named_parameters():
            if is_quantized(global_name(model, name)):
                if weight.shape[-1] % BLOCK:
                    raise UserError(
                        f"its experts are in MXFP4, and megatron.expert_tensor_parallel_size cuts the {BLOCK} weights "
                        "that share a scale; lower it"
                    )
                weight.copy_(fake_quantize(weight, rule))


_SUMS = ("squared_error", "square", "saturated", "changed", "weights_before", "weights", "clipped", "blocks")
_NUM_SUMS = len(_SUMS)


def _sums(weight: Tensor, before: Tensor | None, rule: Rule) -> Tensor:
    """Those of _SUMS, float64 on the CPU."""
    code = encode_mxfp4(weight, rule)
    value, w = decode_mxfp4(code, torch.float32), weight.float()
    top = _LARGEST * torch.exp2(code.scale.float() - 127)
    in_blocks, values_in_blocks = (x.unflatten(-1, (-1, BLOCK)) for x in (w, value))
    found = {
        "squared_error": (value - w).square().sum(),
        "square": w.square().sum(),
        "saturated": (values_in_blocks.abs() == top[..., None]).sum(),
        "changed": (value if before is None else before).ne(value).sum(),
        "clipped": (in_blocks.abs().amax(-1) > top).sum(),
    }
    counts = {"weights_before": 0 if before is None else w.numel(), "weights": w.numel(), "blocks": top.numel()}
    return torch.tensor([{**found, **counts}[name] for name in _SUMS], dtype=torch.float64)


_LARGEST = 6.0
"""Of E2M1."""


def _over_ranks(sums: Tensor) -> Tensor:
    """Copies on data-parallel ranks count equally often, and so not at all in shares."""
    sums = sums.to(device.DEVICE)
    dist.all_reduce(sums)
    return sums.cpu()


def _metrics(sums_LN: Tensor) -> QuantizationMetrics:
    def share(of: str, among: str, rows: Tensor) -> float:
        return float(rows[_SUMS.index(of)] / rows[_SUMS.index(among)].clamp_min(1e-300))

    total = sums_LN.sum(0)
    layers = {i: row for i, row in enumerate(sums_LN) if row[_SUMS.index("weights")]}
    return QuantizationMetrics(
        error=share("squared_error", "square", total) ** 0.5,
        error_of_layer={i: share("squared_error", "square", row) ** 0.5 for i, row in layers.items()},
        changed=share("changed", "weights_before", total),
        clipped_blocks=share("clipped", "blocks", total),
        saturated=share("saturated", "weights", total),
    )


def _layer_of(name: str) -> int:
    return int(name.removeprefix("decoder.layers.").partition(".")[0])
