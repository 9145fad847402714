"""No baseline inside the group (REINFORCE): A_i = R_i.

With `finetune.rl.normalize_reward` the batch is normalised as a whole, which is REINFORCE++ (arXiv 2501.03262).
"""

from __future__ import annotations

from pipelinerl.rl.advantages.base import Advantages, GroupRewards


def reinforce(rewards: GroupRewards) -> Advantages:
    return [[float(reward) for reward in samples] for samples in rewards]
