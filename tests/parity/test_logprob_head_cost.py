"""What the log-prob head takes: its products, its collectives, its memory."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch
from head_cases import Case, D, of_rank
from ranks import Pools
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Products(TorchDispatchMode):
    """The multiplications of each matrix product made within."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = list[int]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (name := func.overloadpacket.__name__) in ("mm", "addmm_"):
            a_MK, b_KN = args[-2:]
            self.sizes.append(a_MK.numel() * b_KN.shape[1])
            assert name == "mm" or len(args) == 3
        return func(*args, **(kwargs or {}))


def test_a_pass_is_three_products_and_two_with_a_frozen_weight() -> None:
    """Its gradient is what the third is for. Of T tokens times the vocabulary each; one more here is the scoring pass
    that `of_rank` compares with."""
    case = Case(num_tokens=40)
    whole = case.num_tokens * case.vocab_size * case.width
    found = []
    for is_frozen, products in ((False, 3), (True, 2)):
        with Products() as seen:
            found.append(of_rank(case, chunk=20, is_frozen=is_frozen))
        assert sum(seen.sizes) == (products + 1) * whole
    trained, frozen = found
    assert all(torch.equal(x, y) for x, y in zip(trained[:4], frozen[:4], strict=True)), "bit for bit"


def collectives(case: Case, chunk: int, sequence_parallel: bool) -> tuple[list[tuple[str, int]], int]:
    """Name and number of entries of each of a training pass, and how many a scoring pass has."""
    import torch.distributed as dist

    calls: list[tuple[str, int]] = []
    names = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
    upstream = {name: getattr(dist, name) for name in names}

    def counted(name, tensor, *args, **kwargs):
        calls.append((name, tensor.numel()))
        return upstream[name](tensor, *args, **kwargs)

    try:
        for name in names:
            setattr(dist, name, lambda *args, name=name, **kwargs: counted(name, *args, **kwargs))
        of_rank(case, chunk, sequence_parallel=sequence_parallel)
    finally:
        for name in names:
            setattr(dist, name, upstream[name])
    return calls[:-2], len(calls) - len(calls[:-2])


def test_the_collectives_are_those_that_the_method_needs(ranks: Pools) -> None:
    """[T] once, then of each chunk three sums a token and its gradient; of a scoring pass [T] and [3, T]."""
    T, c = 40, 20
    for calls, _ in ranks(2)(collectives, Case(num_tokens=T), c, False):
        assert calls == [("all_reduce", T), *[("all_reduce", 3 * c), ("all_reduce", c * D)] * 2]
    for calls, _ in ranks(2)(collectives, Case(num_tokens=T), c, True):
        assert [n for name, n in calls if name == "all_reduce"] == [T, 3 * c, 3 * c]
        assert [name for name, _ in calls].count("reduce_scatter_tensor") == 2


class Largest(TorchDispatchMode):
    """The largest tensor that is made within, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.nbytes = max(self.nbytes, tensor.numel() * tensor.element_size())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_has_the_size_of_all_tokens_times_the_vocabulary(dtype: torch.dtype) -> None:
    case, chunk = Case(num_tokens=128, vocab_size=1000, width=8, dtype=dtype), 16
    with Largest() as seen:
        of_rank(case, chunk, block=125)
    assert seen.nbytes == chunk * case.vocab_size * dtype.itemsize


class Peak(TorchDispatchMode):
    """The bytes of all tensors made within that exist at once, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes, self._live = 0, dict[int, int]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor) and (key := (storage := tensor.untyped_storage())._cdata) not in self._live:
                self._live[key] = storage.nbytes()
                weakref.finalize(storage, self._live.pop, key, None)
                self.nbytes = max(self.nbytes, sum(self._live.values()))
        return out


def divergences(case: Case, top_k: int | None, chunk: int, is_frozen: bool = False) -> tuple[Tensor, Tensor | None]:
    """The gradients of their sum, from a teacher whose hidden states point the other way."""
    from megatron_mopd.mcore.divergence_pass import TeacherRows, divergence_pass
    from megatron_mopd.mcore.vocab_slice import VocabSlice
    from megatron_mopd.objectives.distribution import vocab_parallel_divergence

    hidden_TD, weight_VD, target_T, _ = case.draw()
    _, _, gradients = divergence_pass(
        VocabSlice(weight_VD, 0, 1.0, None, block=case.vocab_size // 4),
        *(hidden_TD, target_T, lambda _, at_c: torch.ones(len(at_c)), partial(vocab_parallel_divergence, top_k)),
        [TeacherRows(torch.arange(case.num_tokens), -hidden_TD, weight_VD)],
        *(chunk, is_frozen),
    )
    return gradients.hidden_tD, gradients.weight_vD


def test_divergences_with_a_frozen_weight_are_a_product_less() -> None:
    case, found = Case(num_tokens=32), []
    for is_frozen, products in ((False, 4), (True, 3)):
        with Products() as seen:
            found.append(divergences(case, None, 16, is_frozen))
        assert sum(seen.sizes) == products * case.num_tokens * case.vocab_size * case.width
    (hidden_TD, _), (of_frozen_TD, nothing) = found
    assert torch.equal(hidden_TD, of_frozen_TD)
    assert hidden_TD.any()
    assert nothing is None


@pytest.mark.parametrize("top_k", [None, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chunk_of_divergences_takes_the_memory_that_is_planned_for_it(dtype: torch.dtype, top_k: int | None) -> None:
    from megatron_mopd.mcore.divergence_pass import BYTES_OF_LOGIT

    case, chunk = Case(num_tokens=32, vocab_size=10_000, width=2, dtype=dtype), 16
    with Peak() as seen:
        divergences(case, top_k, chunk)
    planned = BYTES_OF_LOGIT * chunk * case.vocab_size
    assert 0.8 * planned < seen.nbytes < 1.05 * planned
