"""A problem for the log-prob head, drawn alike on every rank, and what float64 autograd says of it. Needs torch alone.

Of a weighted sum of log-probs, from hidden states and the weight, with a vocabulary cut over ranks as Megatron cuts it
and padded.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

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
    device: str = "cpu"

    def draw(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Hidden states, weight, targets, coefficients."""
        g = torch.Generator().manual_seed(self.seed)
        weight_VD = torch.randn(self.vocab_size, self.width, generator=g) / self.width**0.5
        target_T = torch.randint(self.vocab_size, (self.num_tokens,), generator=g)
        hidden_TD = torch.randn(self.num_tokens, self.width, generator=g) * self.scale
        more_T = torch.linspace(0, self.largest, self.num_tokens)
        towards_TD = weight_VD[target_T] / weight_VD[target_T].square().sum(-1, keepdim=True)
        hidden_TD = hidden_TD + more_T[:, None] * towards_TD
        drawn = hidden_TD.to(self.dtype), weight_VD.to(self.dtype), target_T, torch.randn(self.num_tokens, generator=g)
        hidden_TD, weight_VD, target_T, weight_T = (x.to(self.device) for x in drawn)
        return hidden_TD, weight_VD, target_T, weight_T


class Found(NamedTuple):
    logprobs_T: Tensor
    entropy_T: Tensor
    grad_square_T: Tensor
    hidden_tD: Tensor
    weight_vD: Tensor
    """Without rows where the weight is frozen."""


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


def of_rank(case: Case, chunk: int, block: int = 40, sequence_parallel: bool = False, is_frozen: bool = False) -> Found:
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
    scored, coefficient_T, gradients = one_pass(
        layer, tokens, target_T, lambda _, index_c: weight_T[index_c], is_frozen=is_frozen
    )
    assert torch.equal(coefficient_T, weight_T)
    by_scoring = layer.score(hidden_TD, target_T, chunk)
    torch.testing.assert_close(torch.stack(by_scoring), torch.stack(scored), rtol=1e-5, atol=1e-5)
    assert (gradients.weight_vD is None) == is_frozen
    grad_vD = weight_VD[:0].float() if gradients.weight_vD is None else gradients.weight_vD
    return Found(*scored, gradients.hidden_tD, grad_vD)


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
