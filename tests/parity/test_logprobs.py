"""Vocabulary-parallel log-probs equal log_softmax for any number of ranks, in value and gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ranks import Pools
from torch import Tensor

T, V = 33, 50
SLICES = {1: [50], 2: [32, 18], 4: [16, 16, 16, 2]}
"""Columns of each rank: equal slices of a padded vocabulary, without the padding."""


def draw(scale: float) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    logits_TV = torch.randn(T, V, generator=g) * scale
    return logits_TV, torch.randint(V, (T,), generator=g), torch.randn(T, generator=g)


def of_rank(scale: float, slices: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:
    """This rank's log-probs, entropy, squared gradients and gradient of its columns, and how many all-reduces it
    took."""
    import torch.distributed as dist

    from megatron_mopd.objectives.logprobs import vocab_parallel_logprobs

    calls = 0
    upstream = dist.all_reduce

    def counted(*args, **kwargs):
        nonlocal calls
        calls += 1
        return upstream(*args, **kwargs)

    dist.all_reduce = counted
    try:
        rank = dist.get_rank()
        start = sum(slices[:rank])
        logits_TV, target_T, weight_T = draw(scale)
        logits_Tv = logits_TV[:, start : start + slices[rank]].clone().requires_grad_()
        logprobs_T, entropy_T, square_T = vocab_parallel_logprobs(logits_Tv, target_T, start, dist.group.WORLD)
        (weight_T * logprobs_T).sum().backward()
    finally:
        dist.all_reduce = upstream
    assert logits_Tv.grad is not None
    return logprobs_T.detach().numpy(), entropy_T.numpy(), square_T.numpy(), logits_Tv.grad.numpy(), calls


def reference(scale: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    logits_TV, target_T, weight_T = draw(scale)
    logits_TV = logits_TV.double().requires_grad_()
    all_TV = logits_TV.log_softmax(-1)
    logprobs_T = all_TV.gather(1, target_T[:, None])[:, 0]
    entropy_T = -(all_TV.exp() * all_TV).sum(-1)
    (weight_T.double() * logprobs_T).sum().backward()
    assert logits_TV.grad is not None
    return logprobs_T.detach().numpy(), entropy_T.detach().numpy(), logits_TV.grad.numpy()


@pytest.mark.parametrize("scale", [1.0, 30.0, 1.0e4])
@pytest.mark.parametrize("slices", [*SLICES.values(), [50, 0], [0, 50]], ids=str)
def test_logprobs_equal_log_softmax(slices: list[int], scale: float, ranks: Pools) -> None:
    """Also with near-certain tokens, and where a rank holds nothing but padding."""
    logprobs, entropy, gradient = reference(scale)
    parts = ranks(len(slices))(of_rank, scale, slices)
    for got_logprobs, got_entropy, _, _, calls in parts:
        np.testing.assert_allclose(got_logprobs, logprobs, atol=2e-7 * max(1.0, np.abs(logprobs).max()))
        np.testing.assert_allclose(got_entropy, entropy, atol=2e-6)
        assert calls <= 3
    np.testing.assert_allclose(np.concatenate([p[3] for p in parts], axis=1), gradient, atol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 30.0, 1.0e4])
@pytest.mark.parametrize("slices", [*SLICES.values(), [50, 0]], ids=str)
def test_the_size_of_a_gradient_is_known_before_backward(slices: list[int], scale: float, ranks: Pools) -> None:
    """weight^2 * grad_square is the square of the token's gradient, also where a token is nearly certain."""
    weight_T, gradient_TV = draw(scale)[2].double().numpy(), reference(scale)[2]
    want_T = np.square(gradient_TV).sum(1)
    for part in ranks(len(slices))(of_rank, scale, slices):
        got_T = np.square(weight_T) * part[2]
        np.testing.assert_allclose(got_T, want_T, rtol=1e-4 if scale == 1.0 else 5e-3, atol=1e-30)
        assert np.sqrt(got_T.sum()) == pytest.approx(np.linalg.norm(gradient_TV), rel=1e-6)


def test_ranks_agree_bit_for_bit(ranks: Pools) -> None:
    """Every tensor-parallel rank makes the same coefficients of the same log-probs."""
    parts = ranks(4)(of_rank, 3.0, SLICES[4])
    for logprobs, entropy, square, _, _ in parts[1:]:
        np.testing.assert_array_equal(logprobs, parts[0][0])
        np.testing.assert_array_equal(entropy, parts[0][1])
        np.testing.assert_array_equal(square, parts[0][2])
