"""Group mean without division by the standard deviation (Dr. GRPO, arXiv 2503.20783).

    A_i = R_i - mean(R)

Equals (n - 1) / n times the leave-one-out advantage. The paper's other half, a constant length in the denominator, is
`finetune.rl.aggregation: constant_length`.
"""

from __future__ import annotations

from pipelinerl.rl.advantages.base import Advantages, GroupRewards, all_equal, mean, rollout_rewards, zeros_like


def dr_grpo(rewards: GroupRewards) -> Advantages:
    if len(rewards) < 2 or all_equal(rewards):
        return zeros_like(rewards)
    middle = mean(rollout_rewards(rewards))
    return [[reward - middle for reward in samples] for samples in rewards]
