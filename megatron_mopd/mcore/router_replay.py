"""Router replay (R3): the learner's experts are those that the rollout engine chose for each token.

Megatron's routers have a hook for it, `TopKRouter.router_replay`, called in place of their top-k; `RouteHook` is what
hangs there. Upstream's own RouterReplay is not used (Megatron-Core 0.16.1): it replays all tokens or none, while the
end of a trajectory may have no routes; it is switched for all routers of the process at once, which a pipeline would
have to do before every chunk; and it keeps routes for a recompute that may never come.

How a router knows its routes: before each forward of a model chunk the learner aims the chunk's hooks at the
micro-batch. The first call of a hook after that is the forward; a further one is a recompute within a backward. Those
come in the order of the forwards, so routes wait in a queue, but only those of a forward that will be repeated
(activation checkpointing runs it without gradients).

The weight of an expert is the router's own score of it: gradients reach the router through the experts replayed.

Promises (tests/distributed/test_router_replay.py): replaying the routes that the model would choose anyway changes no
bit; other routes give what a model with those experts gives, at every layout; -1 is no replay; nothing stays behind.

Shape suffixes: T packed tokens of a micro-batch on this context-parallel rank, t this rank's slice of them under
sequence parallelism, N tokens of the batch, L layers of the whole model, l expert layers of a chunk, K experts of a
token, E experts, C cells.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mopd.errors import UserError
from megatron_mopd.mcore import device
from megatron_mopd.mcore.microbatch import DeviceMicroBatch

# isort: split
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router import TopKRouter

_TopK = Callable[..., tuple[Tensor, Tensor]]


class Observer(Protocol):
    """Told once per router and forward what it chose itself, and what it had to take instead (None: its own)."""

    def __call__(
        self, micro: DeviceMicroBatch, place: slice, layer: int, own_tK: Tensor, target_tK: Tensor | None
    ) -> None:
        """`place` is this rank's slice of the tokens of `micro`."""
        ...


class RouteHook:
    """What one router asks for its experts. Without routes (None, or -1 in a token's row) the router chooses itself."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        """Index among all layers of the model, from 0."""
        self._aimed = self._training = False
        self._target_tK: Tensor | None = None
        self._observe: Callable[[Tensor, Tensor | None], None] | None = None
        self._recomputes: deque[Tensor | None] = deque()

    @property
    def idle(self) -> bool:
        """Nothing waits for a forward or a recompute."""
        return not self._aimed and not self._recomputes

    def aim(
        self, target_tK: Tensor | None, training: bool, observe: Callable[[Tensor, Tensor | None], None] | None
    ) -> None:
        """Set the routes of the next forward."""
        self._target_tK, self._training, self._observe, self._aimed = target_tK, training, observe, True

    def get_replay_topk(
        self, scores_tE: Tensor, topk: int, num_groups: int | None, group_topk: int | None, default_compute_topk: _TopK
    ) -> tuple[Tensor, Tensor]:
        """Scores and indices [t, K] of the experts; upstream's name and arguments."""
        scores_tK, own_tK = default_compute_topk(scores_tE, topk, num_groups, group_topk)
        target_tK = self._forward(own_tK) if self._aimed else self._recomputes.popleft()
        if target_tK is None:
            return scores_tK, own_tK
        chosen_tK = own_tK.where(target_tK < 0, target_tK)
        return scores_tE.gather(1, chosen_tK), chosen_tK

    def _forward(self, own_tK: Tensor) -> Tensor | None:
        target_tK, observe = self._target_tK, self._observe
        self._target_tK, self._observe, self._aimed = None, None, False
        if self._training and not torch.is_grad_enabled():
            self._recomputes.append(target_tK)
        if observe is not None:
            observe(own_tK, target_tK)
        return target_tK


class RouterReplay:
    """The hooks of all routers that this rank holds. Not `enabled`: there are none, and routers may be of kinds that
    would never ask one."""

    def __init__(self, models: Sequence[GPTModel], enabled: bool) -> None:
        self._config = models[0].config
        self._enabled = enabled
        self._hooks = {model: [_install(router) for router in _routers(model)] if enabled else [] for model in models}

    def aim(self, model: GPTModel, micro: DeviceMicroBatch, observer: Observer | None = None) -> None:
        """Call right before a forward of `model` on `micro`; replays the routes that `micro` has."""
        hooks = self._hooks[model]
        place = self._place(len(micro.token_T))
        targets: Sequence[Tensor | None] = [None] * len(hooks)
        if micro.routed_experts is not None and hooks:
            targets = self._targets(micro.routed_experts[place], [hook.layer for hook in hooks]).unbind(1)
        for hook, target_tK in zip(hooks, targets, strict=True):
            observe = None if observer is None else partial(observer, micro, place, hook.layer)
            hook.aim(target_tK, model.training, observe)

    def check_idle(self) -> None:
        """Call after a pass: every forward found its routes, and every recompute that was expected came."""
        for hook in (hook for hooks in self._hooks.values() for hook in hooks):
            assert hook.idle, f"the router of layer {hook.layer} did not run as expected"

    def recorder(self, num_tokens: int) -> Recorder:
        assert self._enabled, "nobody asks the routers"
        return Recorder(num_tokens, self._config.num_layers, self._config.moe_router_topk)

    def _place(self, num_tokens: int) -> slice:
        """This rank's slice of the packed tokens, as upstream's embedding scatters them."""
        if not self._config.sequence_parallel:
            return slice(0, num_tokens)
        t = num_tokens // self._config.tensor_model_parallel_size
        start = parallel_state.get_tensor_model_parallel_rank() * t
        return slice(start, start + t)

    def _targets(self, routes_tLK: Tensor, layers: Sequence[int]) -> Tensor:
        """[t, l, K] int64 on the device; UserError for what cannot be a router's choice."""
        expected = (self._config.num_layers, self._config.moe_router_topk)
        if tuple(routes_tLK.shape[1:]) != expected:
            raise UserError(
                f"the batch has routed experts of layers x top-k {tuple(routes_tLK.shape[1:])}, the student has "
                f"{expected}; let the rollout engine serve the student"
            )
        targets_tlK = routes_tLK[:, list(layers)].to(device.DEVICE, non_blocking=True).long()
        sorted_tlK = targets_tlK.sort(-1).values
        assert self._config.num_moe_experts is not None
        chosen_tl = (sorted_tlK[..., 0] >= 0) & (sorted_tlK.diff(dim=-1) > 0).all(-1)
        valid_tl = (sorted_tlK == -1).all(-1) | (chosen_tl & (sorted_tlK[..., -1] < self._config.num_moe_experts))
        if not valid_tl.all():
            token, layer = (~valid_tl).nonzero()[0].tolist()
            raise UserError(
                f"the batch routes a token to experts {targets_tlK[token, layer].tolist()} in layer {layers[layer]}, "
                f"which has {self._config.num_moe_experts}; the rollout engine recorded no routes there, turn "
                "rollout.router_replay off"
            )
        return targets_tlK


def _routers(model: GPTModel) -> list[TopKRouter]:
    return [module for module in model.modules() if isinstance(module, TopKRouter)]


def _install(router: TopKRouter) -> RouteHook:
    assert router.layer_number is not None
    hook = RouteHook(router.layer_number - 1)
    router.router_replay = hook  # pyright: ignore[reportAttributeAccessIssue]
    return hook


class Agreement:
    """Per cell, how often a router would have chosen the recorded experts itself, given those of the layers before."""

    def __init__(self, num_cells: int) -> None:
        self._sums_C2 = torch.zeros(num_cells, 2, dtype=torch.float64, device=device.DEVICE)

    def __call__(
        self, micro: DeviceMicroBatch, place: slice, layer: int, own_tK: Tensor, target_tK: Tensor | None
    ) -> None:
        if target_tK is not None:
            recorded_t = target_tK[:, 0] >= 0
            same_t = recorded_t & (own_tK.sort(-1).values == target_tK.sort(-1).values).all(-1)
            self._sums_C2.index_add_(0, micro.cell_T[place], torch.stack([same_t, recorded_t], -1).double())

    def reduce(self) -> np.ndarray:
        """[C, 2] (agreeing, recorded) choices of the whole batch, the same on every rank: each is one rank's."""
        dist.all_reduce(self._sums_C2)
        return self._sums_C2.cpu().numpy()


class Recorder:
    """The choices of all routers, token by token."""

    def __init__(self, num_tokens: int, num_layers: int, topk: int) -> None:
        self._routes_NLK = torch.zeros(num_tokens, num_layers, topk, dtype=torch.int32, device=device.DEVICE)

    def __call__(
        self, micro: DeviceMicroBatch, place: slice, layer: int, own_tK: Tensor, target_tK: Tensor | None
    ) -> None:
        target_t = micro.token_T[place]
        real_t = target_t >= 0
        self._routes_NLK[target_t[real_t] - 1, layer] = (own_tK[real_t] + 1).int()

    def reduce(self) -> np.ndarray:
        """[N, L, K] int16 as in batch.Batch, the same on every rank; -1 in dense layers and for what was no input."""
        dist.all_reduce(self._routes_NLK)
        return (self._routes_NLK - 1).cpu().numpy().astype(np.int16)
