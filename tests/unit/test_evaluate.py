"""What `mopd eval` makes of what environments say."""

from __future__ import annotations

import pytest

from megatron_mopd.errors import UserError
from megatron_mopd.evaluate import check_reward, measured
from megatron_mopd.types import Outcome, Prompt, RenderedPrompt, Segment, Trajectory


def sampled(reward: float) -> Trajectory:
    segment = Segment((1,), (0.0,), (True,), 0)
    prompt = RenderedPrompt(Prompt("p", "law", "low", "qa", ()), (1,), (1,))
    return Trajectory("0/p@eval", prompt, (segment,), "stop", Outcome(reward, 1))


@pytest.mark.parametrize("reward", [-1.0, 1.5])
def test_a_reward_that_is_no_share_is_refused_at_once(reward: float) -> None:
    """Means of -1 and 1 would be shares again, of nothing."""
    with pytest.raises(UserError, match=r"^environment 'qa' gave trajectory 0/p@eval the reward .*from 0 .* to 1"):
        check_reward(sampled(reward))


def test_partly_correct_counts_in_part() -> None:
    trajectories = [sampled(0.0), sampled(0.25)]
    for trajectory in trajectories:
        check_reward(trajectory)
    assert measured(trajectories).score == 0.125
