"""Advantages by name, for one group at a time. Plain lists in and out; no torch.

| name               | A of rollout i                                    | then over the batch     |
|--------------------|---------------------------------------------------|-------------------------|
| rloo               | R_i - mean of the others                          | if `normalize_reward`   |
| grpo               | (R_i - mean) / (std + 1e-4)                       | if `normalize_reward`   |
| dr_grpo            | R_i - mean                                        | if `normalize_reward`   |
| reinforce          | R_i                                               | if `normalize_reward`   |
| reinforce_baseline | R_i - mean                                        | always                  |
| gae                | R_i; the trainer's value head makes it per token  | never                   |

KL in the reward (`kl_reward`) is no part of R: it is subtracted token by token between the two columns.
"""

from pipelinerl.rl.advantages.base import AdvantageFunction, Advantages, GroupRewards, are_equal
from pipelinerl.rl.advantages.batch_norm import normalize_batch
from pipelinerl.rl.advantages.dr_grpo import dr_grpo
from pipelinerl.rl.advantages.grpo import divide_by_std, grpo
from pipelinerl.rl.advantages.kl_reward import kl_rewards, rewards_to_go
from pipelinerl.rl.advantages.reinforce import reinforce
from pipelinerl.rl.advantages.reinforce_baseline import reinforce_baseline
from pipelinerl.rl.advantages.rloo import rloo
from pipelinerl.rl.advantages.step_rewards import discounted_returns

GROUP_BASELINES = ("rloo", "grpo", "dr_grpo", "reinforce_baseline")

ADVANTAGES: dict[str, AdvantageFunction] = {
    "rloo": rloo,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "reinforce": reinforce,
    "reinforce_baseline": reinforce_baseline,
    "gae": reinforce,
}


def group_advantages(rewards: GroupRewards, estimator: str, divide_advantage_by_std: bool = False) -> Advantages:
    """Advantages of one group: `[rollout][sample]` like `rewards`.

    Without a baseline from the group nothing is divided: a group of equal rewards has no spread to divide by.

    Raises:
        ValueError: unknown estimator, or a rollout without samples.
    """
    if estimator not in ADVANTAGES:
        raise ValueError(
            f"finetune.rl.advantage_estimator: got {estimator!r}, expected one of {', '.join(sorted(ADVANTAGES))}"
        )
    if not all(rewards):
        raise ValueError("group_advantages: got a rollout without samples, expected at least one reward each")
    advantages = ADVANTAGES[estimator](rewards)
    if divide_advantage_by_std and estimator in GROUP_BASELINES and estimator != "grpo":
        return divide_by_std(advantages, rewards)
    return advantages


__all__ = [
    "ADVANTAGES",
    "GROUP_BASELINES",
    "AdvantageFunction",
    "Advantages",
    "GroupRewards",
    "are_equal",
    "discounted_returns",
    "group_advantages",
    "kl_rewards",
    "normalize_batch",
    "rewards_to_go",
]
