"""Which samples are not trained, and why. Pure; called by the intake and by the batcher.

Every rejection has a fate and a short reason; the loop writes it to the stream `fates` before it drops the sample.

| fate     | reason                   | when                                                                     |
|----------|--------------------------|--------------------------------------------------------------------------|
| failed   | bad_lengths              | lists of the sample disagree in length                                   |
| failed   | bad_logprob              | a log-prob is missing, not finite, or the server's stand-in for NaN      |
| failed   | bad_ref_logprob          | the same for the reference model's                                       |
| failed   | bad_reward               | the reward is not finite                                                 |
| failed   | no_ref_logprobs          | the reference model could not score it                                   |
| filtered | no_trained_tokens        | nothing to train on                                                      |
| filtered | longer_than_seq_length   | more tokens than `finetune.seq_length`                                   |
| filtered | overlong                 | it was cut at the token limit and `rl.overlong_filtering` is on          |
| filtered | zero_advantage           | its whole group has advantage 0 and `rl.filter_zero_advantage_groups` is on |
| filtered | reward_range             | its group's mean reward is outside `rl.filter_reward_low` .. `..._high`  |
| stale    | max_version_lag          | a token would be older than `finetune.max_version_lag` when trained      |
| stale    | rolled_back              | it was sampled by a version that no longer exists after a resume         |
| stale    | dropped_oldest           | training is slower than generation and the ring was full                 |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pipelinerl.config.finetune import FinetuneConfig, RLConfig
from pipelinerl.records import Fate, Sample, ScoredSample
from pipelinerl.rl.sample_check import find_fault


@dataclass(frozen=True)
class Rejection:
    """One sample that will not be trained."""

    sample: Sample
    fate: Fate
    reason: str


def reject_faulty(samples: Iterable[Sample]) -> tuple[list[Sample], list[Rejection]]:
    """Split off the samples that no algorithm could train on."""
    good: list[Sample] = []
    rejections: list[Rejection] = []
    for sample in samples:
        fault = find_fault(sample)
        if fault is None:
            good.append(sample)
        else:
            rejections.append(Rejection(sample, "failed", fault))
    return good, rejections


def fits(sample: Sample, config: FinetuneConfig) -> bool:
    return len(sample.input_ids) <= config.seq_length


def reject_untrainable(
    scored: Sequence[ScoredSample], config: FinetuneConfig, rewards: Sequence[float] = ()
) -> tuple[list[ScoredSample], list[Rejection]]:
    """Split off the samples of one group that the configuration does not train. Their rewards stay in the baseline.

    Args:
        scored: the group's samples, with the advantages of `score_group`: KL in the reward is not yet in them.
        config: of the trainer.
        rewards: of the group's rollouts, as the task gave them.
    """
    zero_group = config.rl.filter_zero_advantage_groups and not any(a for s in scored for a in s.advantages)
    out_of_range = bool(rewards) and not _is_in_range(math.fsum(rewards) / len(rewards), config.rl)

    def reason(item: ScoredSample) -> str | None:
        if not item.sample.num_trained_tokens:
            return "no_trained_tokens"
        if not fits(item.sample, config):
            return "longer_than_seq_length"
        if config.rl.overlong_filtering and not item.sample.finished:
            return "overlong"
        if out_of_range:
            return "reward_range"
        return "zero_advantage" if zero_group else None

    return _split(scored, "filtered", reason)


def _is_in_range(mean_reward: float, rl: RLConfig) -> bool:
    """low < mean < high: bounds that the rewards reach (0 and 1) leave out groups that are all wrong or all right."""
    low, high = rl.filter_reward_low, rl.filter_reward_high
    return (low is None or mean_reward > low) and (high is None or mean_reward < high)


def reject_stale(
    scored: Sequence[ScoredSample], trained_at_version: int, max_version_lag: int | None
) -> tuple[list[ScoredSample], list[Rejection]]:
    """Split off the samples that would be too old when the weights have version `trained_at_version`."""

    def reason(item: ScoredSample) -> str | None:
        if item.sample.max_version > trained_at_version:
            return "rolled_back"
        if max_version_lag is not None and trained_at_version - item.sample.min_version > max_version_lag:
            return "max_version_lag"
        return None

    return _split(scored, "stale", reason)


def _split(
    scored: Sequence[ScoredSample], fate: Fate, reason_of: Callable[[ScoredSample], str | None]
) -> tuple[list[ScoredSample], list[Rejection]]:
    kept: list[ScoredSample] = []
    rejections: list[Rejection] = []
    for item in scored:
        reason = reason_of(item)
        if reason is None:
            kept.append(item)
        else:
            rejections.append(Rejection(item.sample, fate, reason))
    return kept, rejections
