"""Group mean and standard deviation (GRPO, DeepSeekMath, arXiv 2402.03300).

    A_i = (R_i - mean(R)) / (std(R) + 1e-4)        std with n - 1

Equal rewards give exactly 0, also if they differ by rounding (see `base.EQUAL_RELATIVE`); a group of one gives 0.
"""

from __future__ import annotations

from pipelinerl.rl.advantages.base import STD_EPSILON, Advantages, GroupRewards, rollout_rewards, sample_std
from pipelinerl.rl.advantages.dr_grpo import dr_grpo


def grpo(rewards: GroupRewards) -> Advantages:
    return divide_by_std(dr_grpo(rewards), rewards)


def divide_by_std(advantages: Advantages, rewards: GroupRewards) -> Advantages:
    """Divide the group's advantages by the standard deviation of its rollouts' rewards (plus 1e-4)."""
    scale = 1.0 / (sample_std(rollout_rewards(rewards)) + STD_EPSILON) if len(rewards) > 1 else 1.0
    return [[value * scale for value in samples] for samples in advantages]
