"""Laws of the noise and of drawing tokens."""

from __future__ import annotations

import numpy as np
import torch

from megatron_mopd.embedded.sampling import position_uniforms, sample_tokens, trajectory_key

KEY = trajectory_key(0, "a@1")


def uniforms(count: int) -> np.ndarray:
    return position_uniforms(np.full(count, KEY), np.arange(count))


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    u = uniforms(100_000)
    assert 0.0 <= u.min() < u.max() < 1.0
    counts, _ = np.histogram(u, bins=50, range=(0, 1))
    assert ((counts - 2000) ** 2 / 2000).sum() < 90  # chi-square, 49 degrees of freedom: p = 0.0003
    assert abs(np.corrcoef(u[1:], u[:-1])[0, 1]) < 0.01
    other = position_uniforms(np.full(100_000, trajectory_key(0, "b@1")), np.arange(100_000))
    assert abs(np.corrcoef(u, other)[0, 1]) < 0.01


def test_keys_are_fixed_for_ever() -> None:
    """A resumed run must draw what the first would have drawn, on any machine."""
    assert int(KEY) == 1870177782181240999
    assert uniforms(2).tolist() == [0.05767657980302476, 0.26194199461492196]


def test_the_mixer_is_splitmix64() -> None:
    """Its first output for seed 0, as published; the uniform is its upper 52 bits."""
    zero = np.zeros(1, np.uint64)
    assert position_uniforms(zero, zero)[0] == (0xE220A8397B1DCDAF >> 12) / 2**52


def test_frequencies_follow_the_tempered_probabilities() -> None:
    logits = torch.tensor([0.0, 1.0, -torch.inf, 2.0])
    token, logprob = sample_tokens(logits.expand(100_000, 4), uniforms(100_000), temperature=2.0, top_p=1.0)
    want = (logits / 2).softmax(-1)
    np.testing.assert_allclose(torch.bincount(token, minlength=4) / 100_000, want, atol=0.006)
    torch.testing.assert_close(logprob, want.log()[token])
    assert 2 not in token


def test_top_p_keeps_the_reported_distribution_whole() -> None:
    logits = torch.tensor([0.1, 0.4, 0.3, 0.2]).log()
    token, logprob = sample_tokens(logits.expand(50_000, 4), uniforms(50_000), temperature=1.0, top_p=0.65)
    np.testing.assert_allclose(torch.bincount(token, minlength=4) / 50_000, [0, 4 / 7, 3 / 7, 0], atol=0.01)
    torch.testing.assert_close(logprob, logits[token])


def test_extreme_uniforms_draw_tokens_that_have_a_probability() -> None:
    logits = torch.tensor([[-torch.inf, 3.0, 1.0, -torch.inf]] * 2)
    token, _ = sample_tokens(logits, np.array([0.0, 1.0 - 2.0**-52]), temperature=1.0, top_p=1.0)
    assert token.tolist() == [1, 2]


def test_non_finite_logits_give_a_non_finite_logprob() -> None:
    _, logprob = sample_tokens(torch.full((1, 5), torch.nan), uniforms(1), temperature=1.0, top_p=0.9)
    assert torch.isnan(logprob).all()
