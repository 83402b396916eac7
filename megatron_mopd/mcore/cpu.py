"""Megatron-Core on a machine without a GPU: CPU tensors and gloo behind the names that upstream calls.

The one home of CPU accommodations, with `local_layers.py` (the layers that stand in for Transformer Engine's).
`enable()` runs before `megatron.core` is first imported (`device.py` sees to it) and refuses to run where a GPU is
visible. It changes where tensors live and fills what gloo lacks; it changes no mathematics. Each block names the
upstream code that needs it (megatron-core 0.16.1).
"""

# pyright: reportAttributeAccessIssue=false
# (the point of this module is to assign to attributes of torch)

from __future__ import annotations

import contextlib
import functools
import sys

import torch
import torch.distributed as dist

_CONSTRUCTORS = (
    *("tensor", "as_tensor", "empty", "zeros", "ones", "full", "arange", "linspace", "rand", "randn", "randint", "eye"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
)


@functools.cache
def enable() -> None:
    """Redirect the accelerator calls of torch to the CPU, once per process.

    Raises RuntimeError where a GPU is visible, or after megatron.core was imported (it binds some functions at import).
    """
    if torch.cuda.is_available():
        raise RuntimeError("the CPU shim must not run on a machine with a GPU")
    if "megatron.core" in sys.modules:
        raise RuntimeError("import megatron_mopd.mcore.device before megatron.core")
    torch.compile = _eager
    _redirect_torch_cuda()
    _redirect_device_literals()
    _complete_gloo()
    _redirect_megatron_rng()
    _move_moe_splits_to_host()
    _admit_mla_without_transformer_engine()
    _separate_adam_steps_on_load()
    _vectorise_packed_rope()


def _eager(function=None, **_: object):
    """megatron.core.jit.jit_fuser is torch.compile, applied at import. On a CPU the fusions gain nothing, and importing
    the compiler takes longer than importing all of Megatron."""
    return _eager if function is None else function


class _Stream:
    """Stands for torch.cuda.Stream: CPU work is synchronous, so every wait is over at once."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...
    def wait_stream(self, stream: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


class _Event:
    def __init__(self, *args: object, **kwargs: object) -> None: ...
    def record(self, stream: object = None) -> None: ...
    def wait(self, stream: object = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Event) -> float:
        return 0.0


def _redirect_torch_cuda() -> None:
    """Layers, DDP buffers, pipeline p2p, the token dispatcher, timers and checkpoints call these on any device."""
    stream = _Stream()
    cuda = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.set_device = lambda device: None
    cuda.synchronize = lambda device=None: None
    cuda.empty_cache = lambda: None
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.current_stream = cuda.default_stream = lambda device=None: stream
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device="cuda": torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, device="cuda": torch.set_rng_state(state)
    cuda.manual_seed = cuda.random.manual_seed = torch.manual_seed


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":")[0] == "cuda"


def _on_cpu(constructor):
    @functools.wraps(constructor)
    def redirected(*args, **kwargs):
        kwargs.pop("pin_memory", None)  # pinning needs an accelerator
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs["device"] = "cpu"
        return constructor(*args, **kwargs)

    return redirected


def _redirect_device_literals() -> None:
    """`device="cuda"`, `.cuda()` and type names: optimizer scalars, schedules, rope_utils, checkpoint exchange;
    optimizer.py, distrib_optimizer.py and clip_grads.py compare `Tensor.type()` with `torch.cuda.*Tensor`."""
    import torch.utils._device

    torch.utils._device._device_constructors()  # a cached set of the functions as they were; fill it before they change
    for name in _CONSTRUCTORS:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    upstream_to, upstream_type = torch.Tensor.to, torch.Tensor.type

    def to(self, *args, **kwargs):
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs["device"] = "cpu"
        return upstream_to(self, *("cpu" if _is_cuda(a) else a for a in args), **kwargs)  # pyright: ignore

    def type_(self, *args, **kwargs):
        result = upstream_type(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    torch.Tensor.to, torch.Tensor.type = to, type_
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self


def _complete_gloo() -> None:
    """What NCCL has and gloo lacks: ReduceOp.AVG (MoE metrics, average_in_collective), and all_gather and
    reduce_scatter of unequal sizes (the alltoall dispatcher with expert tensor parallelism)."""
    all_reduce, all_gather, reduce_scatter = dist.all_reduce, dist.all_gather, dist.reduce_scatter

    @functools.wraps(all_reduce)
    def all_reduce_(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if op == dist.ReduceOp.AVG:
            tensor.div_(dist.get_world_size(group))
            op = dist.ReduceOp.SUM
        return all_reduce(tensor, op, group, async_op)

    @functools.wraps(all_gather)
    def all_gather_(outputs, tensor, group=None, async_op=False):
        rows = [o.shape[0] if o.dim() else 1 for o in outputs]
        if len(set(rows)) == 1:
            return all_gather(outputs, tensor, group, async_op)
        assert not async_op, "gloo gathers unequal sizes synchronously"
        padded = tensor.new_zeros((max(rows), *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        parts = [torch.empty_like(padded) for _ in rows]
        all_gather(parts, padded, group)
        for output, part, n in zip(outputs, parts, rows, strict=True):
            output.copy_(part[:n])

    @functools.wraps(reduce_scatter)
    def reduce_scatter_(output, inputs, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if len({i.shape for i in inputs}) == 1:
            return reduce_scatter(output, inputs, op, group, async_op)
        assert not async_op, "gloo scatters unequal sizes synchronously"
        whole = torch.cat(inputs)
        all_reduce(whole, op, group)
        output.copy_(whole.split([i.shape[0] for i in inputs])[dist.get_rank(group)])

    dist.all_reduce, dist.all_gather, dist.reduce_scatter = all_reduce_, all_gather_, reduce_scatter_


def _redirect_megatron_rng() -> None:
    """tensor_parallel/random.py sets the CUDA generator by a call that torch queues until CUDA starts, so never."""
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)


def _move_moe_splits_to_host() -> None:
    """moe_utils.py converts only CUDA tensors to lists of sizes; a CPU one makes all_to_all_single raise a TypeError.
    Without Transformer Engine, `moe_router_dtype` hits a name that was never imported."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def to_host(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = to_host
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _admit_mla_without_transformer_engine() -> None:
    """multi_latent_attention.py takes the mocks of Transformer Engine's classes for its presence, and then fails at
    isinstance of a mock."""
    from megatron.core.extensions import transformer_engine
    from megatron.core.transformer import multi_latent_attention

    multi_latent_attention.HAVE_TE = transformer_engine.HAVE_TE


def _separate_adam_steps_on_load() -> None:
    """DistributedOptimizer over torch.optim.AdamW (no apex, no Transformer Engine): `step` comes from the parameter
    groups, and loading then looks for it among the saved tensors again, where it is missing (KeyError) or that of the
    dummy step before loading. It also gives every parameter the same `step` tensor, which one step advances once per
    parameter. Both are a silently wrong bias correction."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    set_states = DistributedOptimizer._set_main_param_and_optimizer_states
    load = DistributedOptimizer.load_state_dict

    def set_all_but_step(self, param, tensors):
        group, order = self.model_param_group_index_map[param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        set_states(self, param, {**tensors, **({"step": state["step"]} if "step" in state else {})})

    def load_state_dict(self, state_dict):
        load(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    DistributedOptimizer._set_main_param_and_optimizer_states = set_all_but_step
    DistributedOptimizer.load_state_dict = load_state_dict


def _vectorise_packed_rope() -> None:
    """rope_utils.py splits and concatenates once per packed sequence, for query and key of every layer: with hundreds
    of short sequences that costs more than the attention. On a GPU `apply_rope_fusion` has no such loop."""
    from megatron.core.models.common.embeddings import rope_utils

    from megatron_mopd.mcore.packed_index import apply_packed_rope

    rope_utils._apply_rotary_pos_emb_thd = apply_packed_rope
