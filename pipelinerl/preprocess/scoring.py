"""A group -> its samples with advantages. Pure; called by the intake for every group, and again when a step closes.

The baseline of a group is over its rollouts: a rollout counts once however many samples it has, and its advantage is
credited once to every trained token of each of its samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipelinerl.config.finetune import RLConfig
from pipelinerl.records import Sample, ScoredSample
from pipelinerl.rl.advantages import discounted_returns, group_advantages, normalize_batch

STEP_REWARD_KEY = "step_reward"


def score_group(samples: Sequence[Sample], extra_rewards: Sequence[float], rl: RLConfig) -> list[ScoredSample]:
    """Advantages of one group's samples, in their order.

    Args:
        samples: all usable samples of the group.
        extra_rewards: rewards of rollouts that ended well but left no sample; they count in the baseline.
        rl: the algorithm.
    """
    rollouts: dict[str, list[int]] = {}
    for position, sample in enumerate(samples):
        rollouts.setdefault(sample.rollout_id, []).append(position)
    rewards = [_rollout_rewards([samples[p] for p in positions], rl) for positions in rollouts.values()]
    if rl.use_advantages:
        everyone = [*rewards, *([reward] for reward in extra_rewards)]
        values = group_advantages(everyone, rl.advantage_estimator, rl.divide_advantage_by_std)
    else:
        values = rewards
    advantages = [0.0] * len(samples)
    for positions, of_rollout in zip(rollouts.values(), values, strict=False):
        for position, value in zip(positions, of_rollout, strict=True):
            advantages[position] = value
    # With a value head these are rewards: the trainer cuts what it makes of them.
    if rl.relu_log_p_weights and not is_batch_normalized(rl) and rl.advantage_estimator != "gae":
        advantages = [max(value, 0.0) for value in advantages]
    return [ScoredSample(sample=s, advantages=[a]) for s, a in zip(samples, advantages, strict=True)]


def is_batch_normalized(rl: RLConfig) -> bool:
    """True if advantages are normalised over the whole step on top of their group."""
    if rl.advantage_estimator == "gae" or not rl.use_advantages:
        return False
    return rl.normalize_reward or rl.advantage_estimator == "reinforce_baseline"


def normalize_step(scored: Sequence[ScoredSample], rl: RLConfig) -> list[ScoredSample]:
    """Normalise the advantages of a closed step if the algorithm asks for it (see `rl/advantages/batch_norm.py`)."""
    if not is_batch_normalized(rl):
        return list(scored)
    values = normalize_batch([s.advantages[0] for s in scored], [s.sample.num_trained_tokens for s in scored])
    if rl.relu_log_p_weights:
        # Here and not before: subtracting the mean would make negative ones again.
        values = [max(value, 0.0) for value in values]
    return [ScoredSample(sample=s.sample, advantages=[value]) for s, value in zip(scored, values, strict=True)]


def _rollout_rewards(samples: Sequence[Sample], rl: RLConfig) -> list[float]:
    rewards = [sample.reward - _kl_penalty(sample, rl) - length_penalty(sample.output_tokens, rl) for sample in samples]
    if all(sample.metadata.get(STEP_REWARD_KEY) for sample in samples):
        return discounted_returns(rewards, rl.gamma)
    return rewards


def length_penalty(output_tokens: int, rl: RLConfig) -> float:
    """What an output of this length costs (soft overlong punishment: DAPO, arXiv 2503.14476, equation 13).

    0 up to `overlong_buffer_tokens` before `overlong_limit_tokens`, from there in a line to `overlong_penalty` at the
    limit and beyond.
    """
    buffer_tokens, limit = rl.overlong_buffer_tokens, rl.overlong_limit_tokens
    if not buffer_tokens or limit is None:
        return 0.0
    over = output_tokens - (limit - buffer_tokens)
    return rl.overlong_penalty * min(max(over / buffer_tokens, 0.0), 1.0)


def _kl_penalty(sample: Sample, rl: RLConfig) -> float:
    """KL in the reward (k1): coefficient * sum over trained tokens of log mu - log ref."""
    if not rl.reward_minus_kl_coef:
        return 0.0
    return rl.reward_minus_kl_coef * (math.fsum(sample.logprobs) - math.fsum(sample.ref_logprobs))
