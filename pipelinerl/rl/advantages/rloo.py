"""Leave-one-out baseline (RLOO; Kool et al. 2019, Ahmadian et al. arXiv 2402.14740): the default.

    A_i = R_i - mean of R_j over the other rollouts j != i of the group

Unbiased: the baseline of a rollout does not depend on it. Equal rewards give exactly 0; a group of one has no other
rollout to compare with and gives 0.
"""

from __future__ import annotations

import math

from pipelinerl.rl.advantages.base import Advantages, GroupRewards, all_equal, rollout_rewards, zeros_like


def rloo(rewards: GroupRewards) -> Advantages:
    if len(rewards) < 2 or all_equal(rewards):
        return zeros_like(rewards)
    totals = rollout_rewards(rewards)
    whole = math.fsum(totals)
    return [
        [reward - (whole - total) / (len(totals) - 1) for reward in samples]
        for samples, total in zip(rewards, totals, strict=True)
    ]
