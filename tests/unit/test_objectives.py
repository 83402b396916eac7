"""Laws of the objectives: eq. 15 in value and gradient, normalisation, masks, and what carries no gradient."""

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_mopd.objectives.mopd import Mopd
from megatron_mopd.objectives.normalisation import row_weights
from megatron_mopd.objectives.objective import Objective, TokenColumns
from megatron_mopd.objectives.sft import Sft

T, V, R_MAX = 40, 11, 1.5


def columns(weight: Tensor, mask: Tensor, teacher: Tensor) -> TokenColumns:
    return TokenColumns(mask, weight, torch.zeros_like(teacher), teacher, torch.zeros_like(teacher))


def draw(seed: int = 0) -> tuple[Tensor, Tensor, TokenColumns]:
    g = torch.Generator().manual_seed(seed)
    logits_TV = torch.randn(T, V, generator=g) * 2
    target_T = torch.randint(V, (T,), generator=g)
    teacher_T = (torch.randn(T, V, generator=g) * 2).log_softmax(-1).gather(1, target_T[:, None])[:, 0]
    mask_T = torch.rand(T, generator=g) < 0.7
    return logits_TV, target_T, columns(torch.rand(T, generator=g) / T, mask_T, teacher_T)


def logprobs_of(logits_TV: Tensor, target_T: Tensor) -> Tensor:
    return logits_TV.log_softmax(-1).gather(1, target_T[:, None])[:, 0]


def loss_and_gradient(
    objective: Objective, logits_TV: Tensor, target_T: Tensor, c: TokenColumns
) -> tuple[Tensor, Tensor]:
    logits_TV = logits_TV.clone().requires_grad_()
    logprobs_T = logprobs_of(logits_TV, target_T)
    loss = (objective(logprobs_T.detach(), c).coefficient_T * logprobs_T).sum()
    loss.backward()
    assert logits_TV.grad is not None
    return loss.detach(), logits_TV.grad


def reference(r_max: float | None, logits_TV: Tensor, target_T: Tensor, c: TokenColumns) -> tuple[Tensor, Tensor]:
    """Eq. 15 written out in float64 over the whole vocabulary; the gradient by hand: -w r (onehot - softmax)."""
    logprobs_TV = logits_TV.double().log_softmax(-1)
    student_T = logprobs_TV.gather(1, target_T[:, None])[:, 0]
    reward_T = c.teacher_logprobs_T.double() - student_T
    if r_max is not None:
        reward_T = reward_T.clamp(-r_max, r_max)
    scale_T = -(reward_T * c.loss_mask_T * c.weight_T.double())
    onehot_TV = torch.nn.functional.one_hot(target_T, V).double()
    return (scale_T * student_T).sum(), scale_T[:, None] * (onehot_TV - logprobs_TV.exp())


@pytest.mark.parametrize("r_max", [R_MAX, None])
def test_mopd_equals_eq15_in_value_and_gradient(r_max: float | None) -> None:
    logits, target, c = draw()
    loss, gradient = loss_and_gradient(Mopd(r_max), logits, target, c)
    want_loss, want_gradient = reference(r_max, logits, target, c)
    torch.testing.assert_close(loss.double(), want_loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), want_gradient, rtol=1e-5, atol=1e-7)
    if r_max is not None:
        unbounded, _ = loss_and_gradient(Mopd(None), logits, target, c)
        assert abs(loss - unbounded) > 1e-3, "the fixture must reach the bound"


def test_reward_is_linear_inside_the_bound_and_constant_outside() -> None:
    teacher_T = torch.tensor([-1.0, -2.0, -9.0, -20.0])
    student_T = torch.full((4,), -3.0)
    terms = Mopd(5.0)(student_T, columns(torch.ones(4), torch.ones(4, dtype=torch.bool), teacher_T))
    assert terms.coefficient_T.tolist() == [-2.0, -1.0, 5.0, 5.0]
    assert terms.clipped_T.tolist() == [False, False, True, True]
    assert terms.reverse_kl_T.tolist() == [-2.0, -1.0, 6.0, 17.0]


def test_hand_computed_three_tokens() -> None:
    """[P, R1, R2] with probabilities of powers of two: (S1, T1) and (S2, T2) are paired, and the prompt is not."""
    logits_2V = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.125, 0.75]]).log()
    target_2 = torch.tensor([1, 2])  # R1 = 1 with probability 1/4, R2 = 2 with 3/4
    teacher_2 = torch.tensor([0.5, 0.375]).log()  # r = log 2, -log 2
    weight_2 = torch.full((2,), 0.5)
    loss, gradient = loss_and_gradient(
        Mopd(5.0), logits_2V, target_2, columns(weight_2, torch.ones(2, dtype=torch.bool), teacher_2)
    )
    log2 = np.log(2.0)
    np.testing.assert_allclose(loss, -0.5 * (log2 * np.log(0.25) - log2 * np.log(0.75)), rtol=1e-6)
    want = -0.5 * log2 * np.array([[-0.5, 0.75, -0.25], [0.125, 0.125, -0.25]])
    np.testing.assert_allclose(gradient, want, rtol=1e-5)


def test_reward_carries_no_gradient() -> None:
    logits, target, c = draw()
    teacher = c.teacher_logprobs_T.clone().requires_grad_()
    logits = logits.requires_grad_()
    logprobs = logprobs_of(logits, target)
    terms = Mopd(R_MAX)(logprobs.detach(), c._replace(teacher_logprobs_T=teacher.detach()))
    assert not terms.coefficient_T.requires_grad
    (terms.coefficient_T * logprobs).sum().backward()
    assert teacher.grad is None


def test_swapping_the_teacher_changes_the_gradient() -> None:
    logits, target, c = draw()
    other = c._replace(teacher_logprobs_T=c.teacher_logprobs_T.roll(1))
    _, a = loss_and_gradient(Mopd(R_MAX), logits, target, c)
    _, b = loss_and_gradient(Mopd(R_MAX), logits, target, other)
    assert (a - b).abs().max() > 0.01 * a.abs().max()


def test_student_equal_to_teacher_has_no_loss_and_no_gradient() -> None:
    logits, target, c = draw()
    student = logprobs_of(logits, target)
    loss, gradient = loss_and_gradient(Mopd(R_MAX), logits, target, c._replace(teacher_logprobs_T=student))
    assert loss == 0
    assert not gradient.any()


@pytest.mark.parametrize("objective", [Mopd(R_MAX), Sft()])
def test_masked_tokens_carry_no_loss_and_no_gradient(objective: Objective) -> None:
    """Prompts and observations; what the columns hold there does not matter."""
    logits, target, c = draw()
    noise = c._replace(teacher_logprobs_T=c.teacher_logprobs_T.where(c.loss_mask_T, torch.nan))
    loss, gradient = loss_and_gradient(objective, logits, target, noise)
    clean_loss, clean_gradient = loss_and_gradient(objective, logits, target, c)
    assert loss == clean_loss
    assert torch.equal(gradient, clean_gradient)
    assert not gradient[~c.loss_mask_T].any()
    assert gradient[c.loss_mask_T].any(dim=1).all()


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_non_finite_teacher_logprobs_are_left_out_and_counted(value: float) -> None:
    logits, target, c = draw()
    bad = int(c.loss_mask_T.nonzero()[0])
    teacher = c.teacher_logprobs_T.clone()
    teacher[bad] = value
    broken = c._replace(teacher_logprobs_T=teacher)
    mask = c.loss_mask_T.clone()
    mask[bad] = False
    loss, gradient = loss_and_gradient(Mopd(R_MAX), logits, target, broken)
    want_loss, want_gradient = loss_and_gradient(Mopd(R_MAX), logits, target, c._replace(loss_mask_T=mask))
    assert loss == want_loss
    assert torch.equal(gradient, want_gradient)
    trained = Mopd(R_MAX)(torch.zeros(T), broken).trained_T
    assert int((broken.loss_mask_T & ~trained).sum()) == 1


def test_sft_is_cross_entropy() -> None:
    logits, target, c = draw()
    loss, _ = loss_and_gradient(Sft(), logits, target, c)
    cross_entropy = torch.nn.functional.cross_entropy(logits, target, reduction="none")
    torch.testing.assert_close(loss, (cross_entropy * c.weight_T * c.loss_mask_T).sum())


def test_a_long_and_a_short_row_weigh_1_to_1_and_20_to_1() -> None:
    loss_tokens = np.array([80, 4])
    by_sequence = row_weights(loss_tokens, "sequence") * loss_tokens
    by_token = row_weights(loss_tokens, "token") * loss_tokens
    np.testing.assert_allclose(by_sequence, [0.5, 0.5])
    np.testing.assert_allclose(by_token[0] / by_token[1], 20)
    np.testing.assert_allclose(by_token.sum(), 1)


def test_an_empty_response_counts_as_a_row_and_adds_nothing() -> None:
    weights = row_weights(np.array([4, 0]), "sequence")
    np.testing.assert_allclose(weights, [0.125, 0.0])
    np.testing.assert_allclose(row_weights(np.array([4, 0]), "token"), [0.25, 0.0])
    assert not row_weights(np.zeros(3, int), "sequence").any()
