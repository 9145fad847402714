"""What every advantage family shares: the shape of its input, and when rewards count as equal. No torch.

`GroupRewards[i][k]` is the reward of sample k of rollout i (all attempts at one problem). A rollout counts once in
the baseline however many samples it has: its reward R_i is the mean over its samples (they are equal unless the domain
gives step rewards, whose samples carry returns). The result has the shape of the input: A[i][k] is credited to every
trained token of sample k of rollout i.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

GroupRewards = Sequence[Sequence[float]]
Advantages = list[list[float]]
AdvantageFunction = Callable[[GroupRewards], Advantages]

# Rewards that differ by less than this share of their size are equal: 0.1 + 0.2 and 0.3 differ by rounding alone, and
# dividing that difference by its own standard deviation would turn rounding into a gradient.
EQUAL_RELATIVE = 1e-6
STD_EPSILON = 1e-4


def rollout_rewards(rewards: GroupRewards) -> list[float]:
    """R_i of every rollout."""
    return [math.fsum(samples) / len(samples) for samples in rewards]


def are_equal(values: Sequence[float]) -> bool:
    """True if all values are the same up to rounding (or there is at most one)."""
    if len(values) < 2:
        return True
    low, high = min(values), max(values)
    return high - low <= EQUAL_RELATIVE * max(abs(low), abs(high))


def all_equal(rewards: GroupRewards) -> bool:
    """True if every sample of the group has the same reward up to rounding."""
    return are_equal([reward for samples in rewards for reward in samples])


def zeros_like(rewards: GroupRewards) -> Advantages:
    return [[0.0] * len(samples) for samples in rewards]


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def sample_std(values: Sequence[float]) -> float:
    """Standard deviation with n - 1 in the denominator; 0 for equal values."""
    if are_equal(values):
        return 0.0
    middle = mean(values)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1))
