"""The log-prob head: value and gradient are those of float64 autograd, for any number of ranks and chunks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from head_cases import TEMPERATURE, Case, Found, assert_near, error, of_rank, reference
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Pools
from torch import Tensor


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
    """Also where a rank has nothing but padding, and where tokens are done again. From float32, so that the order of
    sums is all that differs: the log-prob of every token to 3e-7 of its size, and of 1 where it is smaller; entropies
    of unlikely tokens hang on a difference of logits and are 1e-5."""
    for case in (Case(num_tokens=40), Case(num_tokens=40, vocab_size=45, largest=-90.0)):
        want = of_rank(case, chunk=1000)
        parts: list[Found] = ranks(size)(of_rank, case, 12, 40, sequence_parallel)
        for part in parts:
            assert all(torch.equal(x, y) for x, y in zip(part[:3], parts[0][:3], strict=True)), "bit for bit"
            assert ((part.logprobs_T - want.logprobs_T).abs() / want.logprobs_T.abs().clamp(min=1.0)).max() < 3e-7
            torch.testing.assert_close(part.grad_square_T, want.grad_square_T, rtol=0, atol=1e-6)
            torch.testing.assert_close(part.entropy_T, want.entropy_T, rtol=0, atol=1e-5)
            if not sequence_parallel:
                assert error(part.hidden_tD, want.hidden_tD.double()) < 1e-6
        if sequence_parallel:
            assert error(torch.cat([p.hidden_tD for p in parts]), want.hidden_tD.double()) < 1e-6
        assert error(torch.cat([p.weight_vD for p in parts]), want.weight_vD.double()) < 1e-6


def sizes_of_chunks(num_own: int, size: int) -> list[int]:
    import torch.distributed as dist

    from megatron_mopd.mcore.token_chunks import TokenChunks

    tokens = TokenChunks(torch.zeros(num_own, 2), size, dist.group.WORLD, sequence_parallel=True)
    return [len(part.index_c) for part in tokens]


def test_a_chunk_of_all_slices_is_no_larger_than_asked(ranks: Pools) -> None:
    """Where ranks and slices do not divide evenly either; of one token of each slice at least."""
    assert ranks(2)(sizes_of_chunks, 9, 5) == [[4, 4, 4, 4, 2]] * 2
    assert ranks(2)(sizes_of_chunks, 2, 1) == [[2, 2]] * 2


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
