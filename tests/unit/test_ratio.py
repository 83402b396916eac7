"""Laws of the devices on exp(student - rollout), and of the objective that they are most often used with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_mopd import config
from megatron_mopd.objectives.grpo import Grpo
from megatron_mopd.objectives.mopd import Mopd
from megatron_mopd.objectives.objective import Objective, TokenColumns
from megatron_mopd.objectives.ratio import ratio_terms

T, V = 60, 11
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
MASK = {"mask_low": 0.5, "mask_high": 2.0}
TRUNCATE = {"truncate_low": 0.2, "truncate_high": 1.5}
EVERY = [{}, CLIP, {"clip_high": 0.1}, {"clip_low": 0.1}, MASK, {"mask_high": 1.2}, TRUNCATE, CLIP | MASK | TRUNCATE]


def draw(seed: int = 0) -> tuple[Tensor, Tensor, TokenColumns]:
    """The rollout was another policy, near enough for ratios on both sides of every bound."""
    g = torch.Generator().manual_seed(seed)
    logits_TV = torch.randn(T, V, generator=g)
    target_T = torch.randint(V, (T,), generator=g)

    def other(distance: float) -> Tensor:
        moved_TV = logits_TV + distance * torch.randn(T, V, generator=g)
        return moved_TV.log_softmax(-1).gather(1, target_T[:, None])[:, 0]

    columns = TokenColumns(
        loss_mask_T=torch.rand(T, generator=g) < 0.8,
        weight_T=torch.rand(T, generator=g) / T,
        rollout_logprobs_T=other(0.7),
        teacher_logprobs_T=other(1.0),
        outcome_advantage_T=torch.randn(T, generator=g),
    )
    return logits_TV, target_T, columns


def gradient(objective: Objective, logits_TV: Tensor, target_T: Tensor, columns: TokenColumns) -> tuple[Tensor, Tensor]:
    logits_TV = logits_TV.clone().requires_grad_()
    logprobs_T = logits_TV.log_softmax(-1).gather(1, target_T[:, None])[:, 0]
    terms = objective(logprobs_T.detach(), columns)
    assert not terms.coefficient_T.requires_grad
    (terms.coefficient_T * logprobs_T).sum().backward()
    assert logits_TV.grad is not None
    return terms.coefficient_T, logits_TV.grad


def reference(
    beta: float, options: config.Ratio, logits_TV: Tensor, target_T: Tensor, c: TokenColumns
) -> tuple[Tensor, Tensor]:
    """Float64: coefficients token by token in Python, and autograd through min(ratio * A, clip(ratio) * A), each term
    with what mask and truncation leave of it."""
    logits_TV = logits_TV.double().requires_grad_()
    logprobs_T = logits_TV.log_softmax(-1).gather(1, target_T[:, None])[:, 0]
    fixed_T, want, loss = logprobs_T.detach(), [], torch.zeros((), dtype=torch.float64)
    for t in range(T):
        if not c.loss_mask_T[t]:
            want.append(0.0)
            continue
        advantage = c.outcome_advantage_T[t].double() + beta * (c.teacher_logprobs_T[t].double() - fixed_T[t])
        ratio = (logprobs_T[t] - c.rollout_logprobs_T[t].double()).exp()
        weight = 1.0
        if options.is_on:
            low, high = 1 - (options.clip_low or 2.0), 1 + (options.clip_high or 1e9)
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
            size = float(ratio.detach())
            inside = (options.mask_low or 0.0) <= size <= (options.mask_high or 1e9)
            kept = min(max(size, options.truncate_low or 0.0), options.truncate_high or 1e9)
            loss = loss - c.weight_T[t].double() * surrogate * (inside * kept / size)
            (moved,) = torch.autograd.grad(surrogate, ratio, retain_graph=True)  # 0 or A
            weight = kept * inside * bool(moved != 0)
        else:
            loss = loss - c.weight_T[t].double() * advantage * logprobs_T[t]
        want.append(float(-advantage * weight * c.weight_T[t].double()))
    loss.backward()
    assert logits_TV.grad is not None
    return torch.tensor(want, dtype=torch.float64), logits_TV.grad


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("options", EVERY, ids=lambda o: "+".join(o) or "none")
def test_grpo_equals_the_clipped_surrogate_in_coefficient_and_gradient(options: dict[str, Any], beta: float) -> None:
    logits_TV, target_T, columns = draw()
    ratio = config.Ratio(**options)
    got = gradient(Grpo(beta, ratio), logits_TV, target_T, columns)
    for value, want in zip(got, reference(beta, ratio, logits_TV, target_T, columns), strict=True):
        torch.testing.assert_close(value.double(), want, rtol=1e-4, atol=1e-8)


def test_each_device_has_a_flag_of_its_own() -> None:
    student_T = torch.tensor([0.1, 0.9, 1.1, 1.3, 3.0]).log()
    for sign in (1.0, -1.0):
        terms = ratio_terms(config.Ratio(**CLIP, **MASK, **TRUNCATE), student_T, torch.zeros(5), torch.full((5,), sign))
        assert terms is not None
        assert terms.clipped_T.tolist() == ([False] * 3 + [True] * 2 if sign > 0 else [True] + [False] * 4)
        assert terms.masked_T.tolist() == [True, False, False, False, True]
        assert terms.truncated_T.tolist() == [True, False, False, False, True]
        kept = torch.tensor([0.0, 0.9, 1.1, 0.0 if sign > 0 else 1.3, 0.0])
        torch.testing.assert_close(terms.weight_T, kept)


def test_an_infinite_ratio_is_masked_to_zero_and_not_to_nan() -> None:
    terms = ratio_terms(config.Ratio(mask_high=2.0), torch.zeros(1), torch.full((1,), -1e4), torch.ones(1))
    assert terms is not None
    assert terms.weight_T.tolist() == [0.0]


def test_grpo_without_a_reference_ignores_the_teachers_column() -> None:
    _, _, columns = draw()
    broken = columns._replace(teacher_logprobs_T=torch.full((T,), float("nan")))
    terms = Grpo(0.0, config.Ratio())(torch.zeros(T), broken)
    assert torch.equal(terms.trained_T, columns.loss_mask_T)
    assert torch.equal(terms.coefficient_T, Grpo(0.0, config.Ratio())(torch.zeros(T), columns).coefficient_T)
    assert not terms.reverse_kl_T.any()
    left_out = Grpo(0.5, config.Ratio())(torch.zeros(T), broken)
    assert not left_out.trained_T.any()
    assert not left_out.coefficient_T.any()


def test_mopd_without_outcome_and_ratio_does_not_read_what_they_would() -> None:
    """To the bit, whatever is in their columns."""
    logits_TV, target_T, columns = draw()
    other = columns._replace(
        outcome_advantage_T=torch.full((T,), 9.0), rollout_logprobs_T=columns.rollout_logprobs_T - 1
    )
    plain = gradient(Mopd(1.5), logits_TV, target_T, columns)
    for a, b in zip(plain, gradient(Mopd(1.5, 0.0, config.Ratio()), logits_TV, target_T, other), strict=True):
        assert torch.equal(a, b)


def test_mopd_adds_the_outcome_unclipped_and_weighs_by_the_ratio() -> None:
    logits_TV, target_T, columns = draw()
    student_T = logits_TV.log_softmax(-1).gather(1, target_T[:, None])[:, 0]
    terms = Mopd(0.5, 2.0, config.Ratio(**TRUNCATE))(student_T, columns)
    advantage_T = (columns.teacher_logprobs_T - student_T).clamp(-0.5, 0.5) + 2.0 * columns.outcome_advantage_T
    ratio_T = (student_T - columns.rollout_logprobs_T).exp().clamp(0.2, 1.5)
    want_T = -(advantage_T * ratio_T * columns.weight_T).where(columns.loss_mask_T, 0.0)
    torch.testing.assert_close(terms.coefficient_T, want_T)


def test_mopd_and_grpo_differ_in_the_advantage_alone() -> None:
    """With A as the log-ratio and beta as 1, grpo is mopd without a bound."""
    logits_TV, target_T, columns = draw()
    nothing = columns._replace(outcome_advantage_T=torch.zeros(T))
    a = gradient(Mopd(None), logits_TV, target_T, nothing)
    b = gradient(Grpo(1.0, config.Ratio()), logits_TV, target_T, nothing)
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)
