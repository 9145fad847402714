"""Generalised advantage estimation with a value head (Schulman et al., arXiv 1506.02438). No torch.

    delta_t = r_t + gamma * V_{t+1} - V_t        A_t = delta_t + gamma * lambda * A_{t+1}        return_t = A_t + V_t

Over the trained tokens of one sample, with its reward at the last of them and V = 0 behind it. The trainer calls it
with the values of the policy in training (no gradient), because the preprocessor has no value head.
"""

from __future__ import annotations

from collections.abc import Sequence


def gae(
    rewards: Sequence[float], values: Sequence[float], gamma: float = 1.0, lam: float = 1.0
) -> tuple[list[float], list[float]]:
    """Advantages and value targets of every trained token.

    Args:
        rewards: reward after each token, usually 0 but for the last.
        values: V of the state before each token.

    Raises:
        ValueError: lengths differ.
    """
    if len(rewards) != len(values):
        raise ValueError(f"gae: got {len(rewards)} rewards for {len(values)} values, expected as many")
    advantages = [0.0] * len(values)
    following_advantage = following_value = 0.0
    for t in range(len(values) - 1, -1, -1):
        delta = rewards[t] + gamma * following_value - values[t]
        following_advantage = delta + gamma * lam * following_advantage
        advantages[t] = following_advantage
        following_value = values[t]
    return advantages, [advantage + value for advantage, value in zip(advantages, values, strict=True)]
