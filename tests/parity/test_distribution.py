"""The KL of whole distributions, in value and gradient, is that of float64 autograd for any number of ranks."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from ranks import Pools
from torch import Tensor

from megatron_mopd.objectives.distribution import DistributionKL, vocab_parallel_divergence
from megatron_mopd.objectives.objective import TokenColumns

T, V = 33, 50
SLICES = {1: [50], 2: [32, 18], 4: [16, 16, 16, 2], "empty": [50, 0]}
"""Columns of each rank."""


class Outcome(NamedTuple):
    divergence_T: Tensor
    logprobs_T: Tensor
    entropy_T: Tensor
    grad_square_T: Tensor
    gradient_Tv: Tensor
    """Of the weighted sum, with respect to this rank's columns."""


def draw(dtype: torch.dtype, scale: float = 3.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Student's and teacher's logits, targets, weights."""
    g = torch.Generator().manual_seed(0)
    student_TV, teacher_TV = (torch.randn(T, V, generator=g).to(dtype) * scale for _ in range(2))
    return student_TV, teacher_TV, torch.randint(V, (T,), generator=g), torch.randn(T, generator=g).to(dtype)


def of_rank(top_k: int | None, slices: list[int], dtype: torch.dtype, scale: float = 3.0) -> Outcome:
    import torch.distributed as dist

    rank = dist.get_rank() if dist.is_initialized() else 0
    group = dist.group.WORLD if dist.is_initialized() else None
    columns = slice(sum(slices[:rank]), sum(slices[: rank + 1]))
    student_TV, teacher_TV, target_T, weight_T = draw(dtype, scale)
    student_Tv, teacher_Tv = student_TV[:, columns].clone(), teacher_TV[:, columns]
    found, grad_Tv = vocab_parallel_divergence(top_k, student_Tv, teacher_Tv, target_T, columns.start, group)
    return Outcome(
        found.divergence_T, found.logprobs_T, found.entropy_T, found.grad_square_T, weight_T[:, None] * grad_Tv
    )


def reference(top_k: int, scale: float = 3.0) -> Outcome:
    """The definition, by autograd in float64; the teacher's top k by sorting."""
    student_TV, teacher_TV, target_T, weight_T = draw(torch.float32, scale)
    student_TV = student_TV.double().requires_grad_()
    log_p_TV, log_q_TV = student_TV.log_softmax(-1), teacher_TV.double().log_softmax(-1)
    p_TV, q_TV = log_p_TV.exp(), log_q_TV.exp()
    terms_TV = p_TV * (log_p_TV - log_q_TV) - p_TV + q_TV
    order_TV = log_q_TV.argsort(-1, descending=True)
    assert (terms_TV > -1e-15).all(), "each summand is at least 0"
    divergence_T = terms_TV.gather(1, order_TV[:, :top_k]).sum(-1)
    (own_TV,) = torch.autograd.grad(divergence_T.sum(), student_TV, retain_graph=True)
    (weight_T.double() * divergence_T).sum().backward()
    logprobs_T = log_p_TV.gather(1, target_T[:, None])[:, 0]
    assert student_TV.grad is not None
    found = Outcome(divergence_T, logprobs_T, -(p_TV * log_p_TV).sum(-1), own_TV.square().sum(-1), student_TV.grad)
    return Outcome(*(x.detach() for x in found))


def assert_near(got: list[Outcome], want: Outcome, tolerance: float) -> None:
    """Each rank knows all but the gradient, of which it has its columns."""
    for outcome in got:
        for name in Outcome._fields[:-1]:
            torch.testing.assert_close(
                getattr(outcome, name).double(), getattr(want, name), rtol=tolerance, atol=tolerance
            )
    gradient_TV = torch.cat([outcome.gradient_Tv for outcome in got], dim=-1)
    torch.testing.assert_close(gradient_TV.double(), want.gradient_Tv, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("slices", SLICES.values(), ids=str)
@pytest.mark.parametrize("top_k", [1, 7, 40, None])
def test_any_split_gives_the_value_and_the_gradient_of_float64(
    top_k: int | None, slices: list[int], ranks: Pools
) -> None:
    """A top k of 40 has more tokens than some ranks have columns."""
    got = ranks(len(slices))(of_rank, top_k, slices, torch.float32)
    assert_near(got, reference(V if top_k is None else top_k), 2e-5)


@pytest.mark.parametrize("top_k", [1, 7, V])
def test_the_gradient_is_that_of_autograd_in_float64_and_not_zero(top_k: int) -> None:
    """A top-k KL that is used as a number, without its own gradient, teaches nothing."""
    student_TV, teacher_TV, target_T, weight_T = (
        x.double() if x.is_floating_point() else x for x in draw(torch.float32)
    )
    found, grad_TV = vocab_parallel_divergence(top_k, student_TV, teacher_TV, target_T, 0, None)
    want = reference(top_k)
    torch.testing.assert_close(weight_T[:, None] * grad_TV, want.gradient_Tv, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(found.divergence_T, want.divergence_T, rtol=1e-12, atol=1e-13)
    assert want.gradient_Tv.abs().amax(-1).median() > 1e-3


def test_the_whole_vocabulary_as_top_k_is_the_full_kl() -> None:
    """To the bit, and so is a top k that is larger still."""
    full = of_rank(None, [V], torch.float32)
    for top_k in (V, V + 9):
        for got, want in zip(of_rank(top_k, [V], torch.float32), full, strict=True):
            assert torch.equal(got, want)
    student_TV, teacher_TV, *_ = draw(torch.float32)
    kl_T = torch.nn.functional.kl_div(
        teacher_TV.double().log_softmax(-1), student_TV.double().log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    torch.testing.assert_close(full.divergence_T.double(), kl_T, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [30.0, 1e4])
@pytest.mark.parametrize("top_k", [7, None])
def test_probabilities_that_vanish_leave_no_nan(top_k: int | None, scale: float) -> None:
    got = of_rank(top_k, [V], torch.float32, scale)
    assert all(torch.isfinite(x).all() for x in got)
    want = reference(V if top_k is None else top_k, scale)
    torch.testing.assert_close(got.divergence_T.double(), want.divergence_T, rtol=1e-4, atol=1e-4)


def test_two_of_four_tokens_by_hand() -> None:
    """Probabilities of powers of two. The teacher's first two tokens are 1 and 3."""
    student_V = torch.tensor([0.5, 0.25, 0.125, 0.125])
    teacher_V = torch.tensor([0.125, 0.5, 0.125, 0.25])
    logits_TV = student_V.log()[None]
    found, grad_TV = vocab_parallel_divergence(2, logits_TV, teacher_V.log()[None], torch.tensor([2]), 0, None)
    log2 = torch.tensor(2.0).log()
    summands_k = torch.stack([0.25 * -log2 - 0.25 + 0.5, 0.125 * -log2 - 0.125 + 0.25])
    assert (summands_k > 0).all()
    torch.testing.assert_close(found.divergence_T, summands_k.sum()[None])
    a_V = torch.stack([log2 * 0, -log2, log2 * 0, -log2])
    torch.testing.assert_close(grad_TV, (student_V * (a_V - -0.375 * log2))[None])
    torch.testing.assert_close(found.logprobs_T, torch.tensor([0.125]).log())


@pytest.mark.parametrize("top_k", [7, None])
def test_a_student_equal_to_its_teacher_has_no_loss_and_no_gradient(top_k: int | None) -> None:
    student_TV, _, target_T, _ = draw(torch.float32)
    found, grad_TV = vocab_parallel_divergence(top_k, student_TV.clone(), student_TV, target_T, 0, None)
    assert not found.divergence_T.any()
    assert not grad_TV.any()


def test_the_loss_is_the_weighted_sum_over_the_tokens_that_are_trained() -> None:
    student_TV, teacher_TV, target_T, weight_T = draw(torch.float32)
    mask_T = torch.arange(T) % 3 > 0
    teacher_T = teacher_TV.log_softmax(-1).gather(1, target_T[:, None])[:, 0]
    teacher_T[4] = torch.nan
    columns = TokenColumns(mask_T, weight_T, torch.zeros(T), teacher_T, torch.zeros(T))
    objective = DistributionKL(7)
    found, _ = objective.divergence(student_TV, teacher_TV, target_T, 0, None)
    terms = objective(found.logprobs_T, columns)
    trained_T = mask_T & (torch.arange(T) != 4)
    assert torch.equal(terms.trained_T, trained_T)
    assert torch.equal(terms.coefficient_T, weight_T * trained_T)
    want_T = student_TV.log_softmax(-1).gather(1, target_T[:, None])[:, 0] - teacher_T
    torch.testing.assert_close(terms.reverse_kl_T, want_T.where(trained_T, 0.0))
    assert not terms.clipped_T.any()
