"""Advantage estimators by name. Plain lists in and out; no torch.

| name               | A of rollout i                                  | then over the step    | source           |
|--------------------|-------------------------------------------------|-----------------------|------------------|
| rloo               | R_i - mean of the others                        | if `normalize_reward` | arXiv 2402.14740 |
| grpo               | (R_i - mean) / (std + 1e-4)                     | if `normalize_reward` | arXiv 2402.03300 |
| dr_grpo            | R_i - mean                                      | if `normalize_reward` | arXiv 2503.20783 |
| reinforce          | R_i (normalized: REINFORCE++)                   | if `normalize_reward` | arXiv 2501.03262 |
| reinforce_baseline | R_i - mean                                      | always                | arXiv 2501.03262 |
| gae                | R_i; the value head turns it into one per token | never                 | arXiv 1506.02438 |

The group stage (the second column) needs every rollout of a group, so the preprocessor runs it. Dividing by the spread
of the step (`reinforce_baseline`) instead of the group's does not favor groups that are almost solved or almost
hopeless. Everything over a whole step (KL in the reward, normalization, cutting negative values) happens in the
trainer, in `finetune/step.py`.

A new estimator is one function here and one line in `ADVANTAGES`. A function of your own has the same signature,
`AdvantageInputs -> list[list[float]]`, and is named by its dotted path: `advantage_estimator=my_package.my_module.f`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from msgspec.structs import replace

from pipelinerl.config.algorithm import RLConfig
from pipelinerl.records import Sample
from pipelinerl.rl.user_function import ADVANTAGE_API_VERSION, load_function
from pipelinerl.rollouts import STEP_REWARD

# Rewards closer than this (relative) are equal: 0.1 + 0.2 and 0.3 differ by rounding, and dividing the difference by
# its own standard deviation would turn rounding into a gradient.
EQUAL_RELATIVE = 1e-6
STD_EPSILON = 1e-4
NORM_EPSILON = 1e-8

GroupRewards = Sequence[Sequence[float]]
Advantages = list[list[float]]


@dataclass(frozen=True)
class AdvantageInputs:
    """One group: all attempts at one problem. Fields are only added while `api_version` stays the same.

    Attributes:
        rewards: `rewards[i][k]` of sample k of rollout i, after the length penalty; with step rewards, the return. A
            rollout without samples has one reward.
        samples: the same shape, but `()` for a rollout without samples.
    """

    api_version: ClassVar[int] = ADVANTAGE_API_VERSION

    rewards: GroupRewards
    samples: Sequence[Sequence[Sample]] = ()


def rloo(group: AdvantageInputs) -> Advantages:
    """A_i = R_i - mean of R_j over the other rollouts j != i (leave-one-out; Kool et al. 2019, arXiv 2402.14740).

    Unbiased: the baseline of a rollout does not depend on it. A group of one gives 0.
    """
    rewards = group.rewards
    if len(rewards) < 2 or _all_equal(rewards):
        return _zeros_like(rewards)
    totals = _rollout_rewards(rewards)
    whole = math.fsum(totals)
    return [
        [reward - (whole - total) / (len(totals) - 1) for reward in samples]
        for samples, total in zip(rewards, totals, strict=True)
    ]


def dr_grpo(group: AdvantageInputs) -> Advantages:
    """A_i = R_i - mean(R) (Dr. GRPO, arXiv 2503.20783): (n - 1) / n times the leave-one-out advantage.

    The paper's other half, a constant length in the denominator, is `finetune.rl.aggregation=constant_length`.
    """
    rewards = group.rewards
    if len(rewards) < 2 or _all_equal(rewards):
        return _zeros_like(rewards)
    middle = _mean(_rollout_rewards(rewards))
    return [[reward - middle for reward in samples] for samples in rewards]


def reinforce(group: AdvantageInputs) -> Advantages:
    """A_i = R_i."""
    return [[float(reward) for reward in samples] for samples in group.rewards]


#: `grpo` is divided by the standard deviation afterwards: `divide_advantage_by_std` is on for it.
ADVANTAGES: dict[str, Callable[[AdvantageInputs], Advantages]] = {
    "rloo": rloo,
    "grpo": dr_grpo,
    "dr_grpo": dr_grpo,
    "reinforce": reinforce,
    "reinforce_baseline": dr_grpo,
    "gae": reinforce,
}


def group_advantages(group: AdvantageInputs, rl: RLConfig) -> Advantages:
    """Advantages of one group in the shape of `group.rewards`, one for all trained tokens of a sample.

    A rollout counts once in the baseline, with the mean reward of its samples. Rewards that are equal up to rounding
    give exactly 0. Without a baseline, `divide_advantage_by_std` divides nothing: equal rewards have no spread.

    Raises:
        ConfigError: there is no such function of the user.
        ValueError: it returned another shape or a value that is not finite.
    """
    name = rl.advantage_estimator
    if name in ADVANTAGES:
        advantages = ADVANTAGES[name](group)
    else:
        function = load_function("finetune.rl.advantage_estimator", name, AdvantageInputs.api_version)
        advantages = function(group)
        _check_result(advantages, group.rewards, name)
    if rl.divides_by_std:
        return _divide_by_std(advantages, group.rewards)
    return advantages


def score_group(samples: Sequence[Sample], empty_rollouts: Sequence[float], rl: RLConfig) -> list[Sample]:
    """The samples of one group with their advantages.

    Args:
        empty_rollouts: rewards of successful rollouts without samples; they count in the baseline.
    """
    if not samples:
        return []
    by_rollout: dict[str, list[Sample]] = {}
    for sample in samples:
        by_rollout.setdefault(sample.rollout_id, []).append(sample)
    rollouts = list(by_rollout.values())
    inputs = AdvantageInputs(
        rewards=[*(_rewards(rollout, rl) for rollout in rollouts), *([reward] for reward in empty_rollouts)],
        samples=[*rollouts, *(() for _ in empty_rollouts)],
    )
    found: dict[str, float] = {}
    for rollout, advantages in zip(rollouts, group_advantages(inputs, rl), strict=False):
        found |= {sample.id: advantage for sample, advantage in zip(rollout, advantages, strict=True)}
    return [replace(sample, advantage=found[sample.id]) for sample in samples]


def _rewards(samples: Sequence[Sample], rl: RLConfig) -> list[float]:
    """Reward of each sample of one rollout, in order; with step rewards, the return."""
    rewards = [sample.reward - length_penalty(sample.output_tokens, rl) for sample in samples]
    if all(sample.metadata.get(STEP_REWARD) for sample in samples):
        return discounted_returns(rewards, rl.gamma)
    return rewards


def discounted_returns(rewards: Sequence[float], gamma: float) -> list[float]:
    """Return of every turn of one rollout, in order: G_k = r_k + gamma * G_{k+1}."""
    returns: list[float] = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + gamma * following
        returns.append(following)
    return returns[::-1]


def length_penalty(output_tokens: int, rl: RLConfig) -> float:
    """The penalty on an output of this length (soft overlong punishment: DAPO, arXiv 2503.14476, equation 13).

    0 up to `overlong_buffer_tokens` before `overlong_limit_tokens`, then linear up to `overlong_penalty` at the limit,
    and constant beyond it.
    """
    buffer_tokens, limit = rl.overlong_buffer_tokens, rl.overlong_limit_tokens
    if not buffer_tokens or limit is None:
        return 0.0
    over = output_tokens - (limit - buffer_tokens)
    return rl.overlong_penalty * min(max(over / buffer_tokens, 0.0), 1.0)


def gae(
    rewards: Sequence[float], values: Sequence[float], gamma: float = 1.0, lam: float = 1.0
) -> tuple[list[float], list[float]]:
    """Generalized advantages of the trained tokens of one sample, and their value targets (arXiv 1506.02438).

        delta_t = r_t + gamma * V_{t+1} - V_t        A_t = delta_t + gamma * lam * A_{t+1}        target_t = A_t + V_t

    V is 0 after the last token.

    Args:
        rewards: after each token, usually 0 except for the last.
        values: V of the state before each token.
    """
    advantages = [0.0] * len(values)
    following_advantage = following_value = 0.0
    for t in range(len(values) - 1, -1, -1):
        delta = rewards[t] + gamma * following_value - values[t]
        following_advantage = delta + gamma * lam * following_advantage
        advantages[t] = following_advantage
        following_value = values[t]
    return advantages, [advantage + value for advantage, value in zip(advantages, values, strict=True)]


def cuts_negative(rl: RLConfig) -> bool:
    """True if negative advantages become 0 in the step. Those of a value head are clipped where they are computed."""
    return rl.relu_log_p_weights and rl.advantage_estimator != "gae"


def has_signal(advantage: float, rl: RLConfig) -> bool:
    """False if the group stage shows that a sample with this advantage teaches nothing.

    What KL in the reward or normalization add later does not count: a group of equal rewards has no signal.
    """
    if cuts_negative(rl) and not rl.reward_minus_kl_coef and not rl.normalizes_over_step:
        return advantage > 0
    return advantage != 0


def are_equal(values: Sequence[float]) -> bool:
    """True if all values are the same up to rounding (or there is at most one)."""
    if len(values) < 2:
        return True
    low, high = min(values), max(values)
    return high - low <= EQUAL_RELATIVE * max(abs(low), abs(high))


def _rollout_rewards(rewards: GroupRewards) -> list[float]:
    return [math.fsum(samples) / len(samples) for samples in rewards]


def _all_equal(rewards: GroupRewards) -> bool:
    return are_equal([reward for samples in rewards for reward in samples])


def _zeros_like(rewards: GroupRewards) -> Advantages:
    return [[0.0] * len(samples) for samples in rewards]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _divide_by_std(advantages: Advantages, rewards: GroupRewards) -> Advantages:
    """Divide by the standard deviation (n - 1) of the rollouts' rewards, plus 1e-4."""
    if len(rewards) < 2:
        return advantages
    totals = _rollout_rewards(rewards)
    std = 0.0
    if not are_equal(totals):
        middle = _mean(totals)
        std = math.sqrt(math.fsum((value - middle) ** 2 for value in totals) / (len(totals) - 1))
    scale = 1.0 / (std + STD_EPSILON)
    return [[value * scale for value in samples] for samples in advantages]


def _check_result(advantages: Advantages, rewards: GroupRewards, name: str) -> None:
    got, expected = [len(samples) for samples in advantages], [len(samples) for samples in rewards]
    if got != expected:
        raise ValueError(f"{name}: got advantages for {got} samples of each rollout, expected {expected}")
    if not all(math.isfinite(value) for samples in advantages for value in samples):
        raise ValueError(f"{name}: got advantages that are not finite, expected finite numbers")
