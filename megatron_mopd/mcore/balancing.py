"""Load-balancing and z-losses of the routers, of the same size at every layout.

Megatron attaches such a loss to the router's output, where only its gradient is seen, and in per-token mode multiplies
it by the tokens of this rank. Ranks of tensor and context parallelism share the tokens of a micro-batch, so what is
added up over them comes out 1 / (tp * cp) of the loss, and a global one 1 / (tp * cp * dp) (Megatron-Core 0.16.1;
Megatron-LM #1652 and #5047). Here a loss is multiplied by the tokens that it is a mean over, whatever the release.

Promise (tests/distributed/test_layouts.py): with the same statistics in every micro-batch, the gradient does not depend
on the layout.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_mopd.mcore import device  # noqa: F401

# isort: split
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, z_loss_func
from megatron.core.transformer.moe.router import TopKRouter


class BalancedRouter(TopKRouter):
    """Attaches losses without logging them: nothing reads Megatron's tracker."""

    @classmethod
    def install(cls, models: Sequence[GPTModel]) -> None:
        """Turn the routers of the models into this."""
        MoEAuxLossAutoScaler.main_loss_backward_scale = None  # of earlier models it may have another shape
        for model in models:
            for module in model.modules():
                if type(module) is TopKRouter:
                    module.__class__ = cls

    def attach_and_log_load_balancing_loss(
        self,
        activation: Tensor,
        aux_loss_coeff: float,
        aux_loss: Tensor,
        aux_loss_name: str,
        reduce_group: ProcessGroup,
        **_: object,
    ) -> Tensor:
        """`aux_loss` is this rank's part of the loss over the tokens of all ranks of `reduce_group`."""
        return MoEAuxLossAutoScaler.apply(activation, aux_loss * (len(activation) * reduce_group.size()))

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """A mean over tokens, of which this rank adds its own."""
        assert padding_mask is None, "packed micro-batches have none"
        if not self.config.moe_z_loss_coeff or not logits.requires_grad or not self.training:
            return logits
        return MoEAuxLossAutoScaler.apply(logits, z_loss_func(logits, self.config.moe_z_loss_coeff) * len(logits))
