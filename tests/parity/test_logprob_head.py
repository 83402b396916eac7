"""The log-prob head on its own: value and gradient are those of float64 autograd, for any number of ranks and chunks.

Of a weighted sum of log-probs, from hidden states and the weight, with a vocabulary cut over ranks as Megatron cuts it
and padded.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Pools
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

D, V = 24, 250
TEMPERATURE = 0.8


class Case(NamedTuple):
    """What is drawn the same on every rank."""

    num_tokens: int = 33
    vocab_size: int = V
    width: int = D
    scale: float = 3.0
    """Of logits."""
    dtype: torch.dtype = torch.float32
    temperature: float = TEMPERATURE
    largest: float = 0.0
    """Added to the target's logit, 0 to this much from the first token to the last."""
    seed: int = 0

    def draw(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Hidden states, weight, targets, coefficients."""
        g = torch.Generator().manual_seed(self.seed)
        weight_VD = torch.randn(self.vocab_size, self.width, generator=g) / self.width**0.5
        target_T = torch.randint(self.vocab_size, (self.num_tokens,), generator=g)
        hidden_TD = torch.randn(self.num_tokens, self.width, generator=g) * self.scale
        more_T = torch.linspace(0, self.largest, self.num_tokens)
        towards_TD = weight_VD[target_T] / weight_VD[target_T].square().sum(-1, keepdim=True)
        hidden_TD = hidden_TD + more_T[:, None] * towards_TD
        return hidden_TD.to(self.dtype), weight_VD.to(self.dtype), target_T, torch.randn(self.num_tokens, generator=g)


class Found(NamedTuple):
    logprobs_T: Tensor
    entropy_T: Tensor
    grad_square_T: Tensor
    hidden_tD: Tensor
    weight_vD: Tensor


def reference(case: Case) -> Found:
    hidden_TD, weight_VD, target_T, weight_T = case.draw()
    hidden_TD, weight_VD = hidden_TD.double().requires_grad_(), weight_VD.double().requires_grad_()
    logits_TV = hidden_TD @ weight_VD.t() / case.temperature
    log_p_TV = logits_TV.log_softmax(-1)
    logprobs_T = log_p_TV.gather(1, target_T[:, None])[:, 0]
    (grad_TV,) = torch.autograd.grad(logprobs_T.sum(), logits_TV, retain_graph=True)
    (weight_T.double() * logprobs_T).sum().backward()
    assert hidden_TD.grad is not None
    assert weight_VD.grad is not None
    entropy_T = -torch.xlogy(log_p_TV.exp(), log_p_TV.exp()).sum(-1)
    found = logprobs_T, entropy_T, grad_TV.square().sum(-1), hidden_TD.grad, weight_VD.grad
    return Found(*(x.detach() for x in found))


def slice_of(case: Case, rank: int, size: int) -> range:
    """Equal parts of a vocabulary that is padded to a multiple of 16, without the padding."""
    part = -(-case.vocab_size // (16 * size)) * 16
    return range(min(rank * part, case.vocab_size), min((rank + 1) * part, case.vocab_size))


def of_rank(case: Case, chunk: int, block: int = 40, sequence_parallel: bool = False) -> Found:
    """Without a process group: of one rank with everything."""
    import torch.distributed as dist

    from megatron_mopd.mcore.one_pass import one_pass
    from megatron_mopd.mcore.token_chunks import TokenChunks
    from megatron_mopd.mcore.vocab_slice import VocabSlice

    group = dist.group.WORLD if dist.is_initialized() else None
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    hidden_TD, weight_VD, target_T, weight_T = case.draw()
    mine = slice_of(case, rank, size)
    layer = VocabSlice(weight_VD[mine.start : mine.stop], mine.start, case.temperature, group, block)
    hidden_tD = hidden_TD.chunk(size)[rank] if sequence_parallel else hidden_TD
    tokens = TokenChunks(hidden_tD, chunk, group, sequence_parallel)
    scored, coefficient_T, gradients = one_pass(layer, tokens, target_T, lambda _, index_c: weight_T[index_c])
    assert torch.equal(coefficient_T, weight_T)
    by_scoring = layer.score(hidden_TD, target_T, chunk)
    torch.testing.assert_close(torch.stack(by_scoring), torch.stack(scored), rtol=1e-5, atol=1e-5)
    return Found(*scored, gradients.hidden_tD, gradients.weight_vD)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-30))


def assert_near(got: Found, want: Found, of_gradient: float) -> None:
    """Log-probs to 1e-5: logits of 60 are rounded by 4e-6 in float32."""
    size_T = want.logprobs_T.abs().clamp(min=1.0)
    for name in ("logprobs_T", "entropy_T", "grad_square_T"):
        difference_T = (getattr(got, name).double() - getattr(want, name)).abs() / size_T
        assert not difference_T.numel() or difference_T.max() < 1e-5, name
    if want.hidden_tD.numel():
        assert error(got.hidden_tD, want.hidden_tD) < of_gradient
        assert error(got.weight_vD, want.weight_vD) < of_gradient


@pytest.mark.parametrize(("dtype", "of_gradient"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-3)])
@pytest.mark.parametrize("largest", [0.0, 40.0])
def test_value_and_gradient_are_those_of_float64(dtype: torch.dtype, of_gradient: float, largest: float) -> None:
    """From bfloat16 too: logits, log-probs and what is added up are float32. Only the factors of a product are not."""
    case = Case(dtype=dtype, largest=largest)
    want = reference(case)
    assert_near(of_rank(case, chunk=8), want, of_gradient)
    if largest:
        assert want.logprobs_T[-1] > -1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_from_0_to_minus_300(dtype: torch.dtype) -> None:
    """Finite and right, with gradients; the larger part is done in a second pass. In float32 a logit of 60 is uncertain
    by about 1e-5, and so is the probability that is left of a near-certain token, in units of itself."""
    case = Case(num_tokens=64, dtype=dtype, temperature=1.0, largest=-300.0)
    other = case._replace(largest=60.0)
    for one in (case, other):
        want = reference(one)
        got = of_rank(one, chunk=16)
        assert all(torch.isfinite(x).all() for x in got)
        relative_T = (got.logprobs_T - want.logprobs_T).abs() / want.logprobs_T.abs()
        assert relative_T.max() < 5e-5
        assert_near(got, want, 1e-6 if dtype == torch.float32 else 2e-3)
    assert reference(case).logprobs_T.min() < -280
    assert -1e-9 < reference(other).logprobs_T.max() < 0


@settings(max_examples=40)
@given(
    num_tokens=st.integers(0, 20),
    vocab_size=st.integers(2, 70),
    width=st.integers(1, 9),
    chunk=st.integers(1, 25),
    block=st.integers(1, 80),
    largest=st.sampled_from([0.0, 30.0, -90.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 9),
)
def test_any_shape(
    num_tokens: int, vocab_size: int, width: int, chunk: int, block: int, largest: float, dtype: torch.dtype, seed: int
) -> None:
    """No token, one token, chunks of one and larger than all."""
    case = Case(num_tokens, vocab_size, width, 2.0, dtype, TEMPERATURE, largest, seed)
    assert_near(of_rank(case, chunk, block), reference(case), 3e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neither_chunks_nor_packing_change_a_result(dtype: torch.dtype) -> None:
    """Beyond rounding: the order of tokens is another way to pack them."""
    case = Case(num_tokens=40, dtype=dtype, largest=-60.0)
    whole = of_rank(case, chunk=1000, block=1000)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-3
    for chunk, block in ((1, 16), (7, 250), (20, 33)):
        got = of_rank(case, chunk, block)
        torch.testing.assert_close(torch.stack(got[:3]), torch.stack(whole[:3]), rtol=2e-6, atol=1e-5)
        assert error(got.hidden_tD, whole.hidden_tD.double()) < tolerance
        assert error(got.weight_vD, whole.weight_vD.double()) < tolerance


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["TP", "TP+SP"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_agree_with_one(size: int, sequence_parallel: bool, ranks: Pools) -> None:
    """Also where a rank has nothing but padding, and where tokens are done again."""
    for case in (Case(num_tokens=40), Case(num_tokens=40, vocab_size=45, largest=-90.0)):
        want = of_rank(case, chunk=1000)
        parts: list[Found] = ranks(size)(of_rank, case, 12, 40, sequence_parallel)
        for part in parts:
            assert all(torch.equal(x, y) for x, y in zip(part[:3], parts[0][:3], strict=True)), "bit for bit"
            torch.testing.assert_close(torch.stack(part[:3]), torch.stack(want[:3]), rtol=2e-6, atol=1e-5)
            if not sequence_parallel:
                assert error(part.hidden_tD, want.hidden_tD.double()) < 1e-6
        if sequence_parallel:
            assert error(torch.cat([p.hidden_tD for p in parts]), want.hidden_tD.double()) < 1e-6
        assert error(torch.cat([p.weight_vD for p in parts]), want.weight_vD.double()) < 1e-6


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


def sizes_of_chunks(num_own: int, size: int) -> list[int]:
    import torch.distributed as dist

    from megatron_mopd.mcore.token_chunks import TokenChunks

    tokens = TokenChunks(torch.zeros(num_own, 2), size, dist.group.WORLD, sequence_parallel=True)
    return [len(part.index_c) for part in tokens]


def test_a_chunk_of_all_slices_is_no_larger_than_asked(ranks: Pools) -> None:
    """Where ranks and slices do not divide evenly either; of one token of each slice at least."""
    assert ranks(2)(sizes_of_chunks, 9, 5) == [[4, 4, 4, 4, 2]] * 2
    assert ranks(2)(sizes_of_chunks, 2, 1) == [[2, 2]] * 2


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


@pytest.mark.parametrize("top_k", [None, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chunk_of_divergences_takes_the_memory_that_is_planned_for_it(dtype: torch.dtype, top_k: int | None) -> None:
    from megatron_mopd.mcore.divergence_pass import BYTES_OF_LOGIT, TeacherRows, divergence_pass
    from megatron_mopd.mcore.vocab_slice import VocabSlice
    from megatron_mopd.objectives.distribution import vocab_parallel_divergence

    case, chunk = Case(num_tokens=32, vocab_size=10_000, width=2, dtype=dtype), 16
    hidden_TD, weight_VD, target_T, _ = case.draw()
    teachers = [TeacherRows(torch.arange(32), hidden_TD, weight_VD)]
    divergence = partial(vocab_parallel_divergence, top_k)
    layer = VocabSlice(weight_VD, 0, 1.0, None, block=2500)
    with Peak() as seen:
        divergence_pass(layer, hidden_TD, target_T, lambda _, at_c: torch.ones(len(at_c)), divergence, teachers, chunk)
    planned = BYTES_OF_LOGIT * chunk * case.vocab_size
    assert 0.8 * planned < seen.nbytes < 1.05 * planned


def test_rounding_logits_would_cost_more_than_the_reward() -> None:
    """Logits as a language model has them, |z| up to about 30, and a teacher close to the student."""
    case = Case(512, 2000, 64, 3.0, torch.bfloat16, 1.0, 26.0)
    want_T, got_T = reference(case).logprobs_T, of_rank(case, chunk=100).logprobs_T.double()
    hidden_TD, weight_VD, target_T, _ = case.draw()
    rounded_T = (hidden_TD @ weight_VD.t()).double().log_softmax(-1).gather(1, target_T[:, None])[:, 0]
    teacher_T = want_T + torch.from_numpy(np.random.default_rng(0).standard_normal(512)) * 0.05

    def damage(logprobs_T: Tensor) -> tuple[float, float]:
        """Relative error of the reward, and the share of its signs that flip."""
        reward_T, true_T = teacher_T - logprobs_T, teacher_T - want_T
        return error(reward_T, true_T), float((reward_T * true_T < 0).double().mean())

    assert damage(got_T)[0] < 5e-3
    assert damage(got_T)[1] == 0
    assert damage(rounded_T)[0] > 0.1
    assert damage(rounded_T)[1] > 0.01
