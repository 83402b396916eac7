"""What an objective is: detached log-probs in, one coefficient per token out. The loss is sum_t coefficient_t *
value_t, where the value is the token's log-prob or, for an objective with a `divergence`, that of its distribution from
its teacher's.

Because the coefficient is detached, the gradient of the loss is sum_t coefficient_t * grad value_t. With log-probs that
is a policy gradient whose reward is a fixed number (eq. 15 of Kimi K3), or cross-entropy. A coefficient holds the
normaliser of the whole batch (normalisation.py), so contributions of micro-batches and ranks are added, never averaged.

Shape suffix: T packed tokens, each column aligned with the token that is predicted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from megatron_mopd.objectives.ratio import RatioTerms

if TYPE_CHECKING:
    from megatron_mopd.objectives.distribution import Divergence


class TokenColumns(NamedTuple):
    """What is known of each target token before the forward pass, from the stored batch."""

    loss_mask_T: Tensor
    """bool: sampled by the student (or demonstrated)."""
    weight_T: Tensor
    """float32: the normaliser of the token's row, see normalisation.py."""
    rollout_logprobs_T: Tensor
    teacher_logprobs_T: Tensor
    outcome_advantage_T: Tensor
    """float32: of the token's trajectory in its group, 0 where the objective uses none; see advantages.py."""


class TokenTerms(NamedTuple):
    """What an objective says of each token. Log-prob differences are 0 outside `trained_T`."""

    coefficient_T: Tensor
    """float32, no gradient, 0 outside `trained_T`."""
    trained_T: Tensor
    """bool: in the mask and finite."""
    reverse_kl_T: Tensor
    """student - teacher, not clipped; 0 for an objective without a teacher."""
    clipped_T: Tensor
    """bool: the log-ratio lies outside its bound."""
    mismatch_T: Tensor
    """trainer - rollout; 0 for demonstrations."""
    ratio: RatioTerms | None = None
    """What the devices of ratio.py did; None where none is on."""


class Objective(Protocol):
    @property
    def divergence(self) -> Divergence | None:
        """What the values are, for which the head needs the teachers' logits; None: the values are log-probs."""
        ...

    def __call__(self, student_logprobs_T: Tensor, columns: TokenColumns) -> TokenTerms:
        """`student_logprobs_T` is detached."""
        ...
