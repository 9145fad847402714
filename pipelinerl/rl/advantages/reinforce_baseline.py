"""REINFORCE++ with group baseline (arXiv 2501.03262): group mean first, then the whole batch is normalised.

    A'_i = R_i - mean(R of the group)          A_i = (A'_i - mean_batch(A')) / std_batch(A')

The first step is that of Dr. GRPO; the second is `normalize_batch`, which the preprocessor applies when it closes a
step (always for this family). Dividing by the batch's spread instead of each group's does not favour groups that are
almost solved or almost hopeless.
"""

from __future__ import annotations

from pipelinerl.rl.advantages.base import Advantages, GroupRewards
from pipelinerl.rl.advantages.dr_grpo import dr_grpo


def reinforce_baseline(rewards: GroupRewards) -> Advantages:
    return dr_grpo(rewards)
