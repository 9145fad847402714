"""A group -> its samples with advantages. Pure; called by the intake for every group, and again when a step closes.

The baseline of a group is over its rollouts: a rollout counts once however many samples it has, and its advantage is
credited once to every trained token of each of its samples. KL in the reward comes behind baseline and filters, when
the step closes: inside a baseline it would be the only difference between rollouts with equal rewards, and a division
by the group's standard deviation would blow it up to the size of a reward.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pipelinerl.config.finetune import RLConfig
from pipelinerl.records import Sample, ScoredSample
from pipelinerl.rl.advantages import discounted_returns, group_advantages, kl_rewards, normalize_batch, rewards_to_go
from pipelinerl.rl.advantages.stages import cuts_negative, is_batch_normalized, is_finished_by_step

STEP_REWARD_KEY = "step_reward"


def score_group(samples: Sequence[Sample], extra_rewards: Sequence[float], rl: RLConfig) -> list[ScoredSample]:
    """Advantages of one group's samples, in their order: one value each, without KL and normalisation (`finish_step`).

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
    if cuts_negative(rl) and not is_finished_by_step(rl):
        advantages = [max(value, 0.0) for value in advantages]
    return [ScoredSample(sample=s, advantages=[a]) for s, a in zip(samples, advantages, strict=True)]


def finish_step(scored: Sequence[ScoredSample], rl: RLConfig, in_trainer: bool = False) -> list[ScoredSample]:
    """What the algorithm does to the advantages of a closed step: KL in the reward, normalisation, no negative ones.

    With A_i the value that sample i has by now and KL_t = log mu - log ref of its trained token t (k1), token t gets

        A_i,t = A_i - reward_minus_kl_coef * sum over t' >= t of KL_t'

    (REINFORCE++, arXiv 2501.03262: a token pays for itself and for what it leads to, within its sample), and the
    normalisation is over the tokens of the step (see `rl/advantages/batch_norm.py`). With `gae` each token's share of
    the reward, -reward_minus_kl_coef * KL_t, goes into `token_rewards` and the trainer's recursion adds it up.

    Args:
        in_trainer: the reference model is beside the trainer, which does all this in its place
            (`finetune/step_advantages.py`).

    Raises:
        ValueError: KL is part of the reward and a sample has not one reference log-prob for each trained token.
    """
    if in_trainer:
        return list(scored)
    if rl.reward_minus_kl_coef:
        scored = [_with_kl(item, rl) for item in scored]
    values = [item.advantages for item in scored]
    if is_batch_normalized(rl):
        values = normalize_batch(values, [item.sample.num_trained_tokens for item in scored])
    if cuts_negative(rl) and is_finished_by_step(rl):
        # Here and not before: what is subtracted above would make negative ones again.
        values = [[max(value, 0.0) for value in of_sample] for of_sample in values]
    return [msgspec.structs.replace(item, advantages=value) for item, value in zip(scored, values, strict=True)]


def _with_kl(item: ScoredSample, rl: RLConfig) -> ScoredSample:
    rewards = kl_rewards(item.sample.logprobs, item.sample.ref_logprobs, rl.reward_minus_kl_coef)
    if rl.advantage_estimator == "gae":
        return msgspec.structs.replace(item, token_rewards=rewards)
    (advantage,) = item.advantages
    return msgspec.structs.replace(item, advantages=[advantage + value for value in rewards_to_go(rewards)])


def _rollout_rewards(samples: Sequence[Sample], rl: RLConfig) -> list[float]:
    rewards = [sample.reward - length_penalty(sample.output_tokens, rl) for sample in samples]
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
