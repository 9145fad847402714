"""Rewards given turn by turn -> return of every turn. No torch.

    G_k = r_k + gamma * r_{k+1} + gamma^2 * r_{k+2} + ...        gamma = finetune.rl.gamma

A domain that rewards single turns marks its samples with `metadata["step_reward"] = True`; their rewards then become
returns before any baseline. The group's baseline compares whole rollouts: R_i is the mean return of its turns
(`base.rollout_rewards`).
"""

from __future__ import annotations

from collections.abc import Sequence


def discounted_returns(rewards: Sequence[float], gamma: float) -> list[float]:
    """Return of every turn of one rollout, in order."""
    returns: list[float] = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + gamma * following
        returns.append(following)
    return returns[::-1]
