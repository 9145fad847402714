"""The step stage of advantages: KL in the reward, normalization over the step, cutting negative values.

With A_i the advantage of sample i from the group stage (`rl/advantages.py`) and KL_t = log mu - log ref of its trained
token t (k1 of J. Schulman, "Approximating KL Divergence", 2020), token t gets

    A_i,t = A_i - beta * sum over t' >= t of KL_t'              beta = `finetune.rl.reward_minus_kl_coef`
    A_i,t = (A_i,t - mean(A)) / (std(A) + 1e-8)                 over the trained tokens of the step

(REINFORCE++, arXiv 2501.03262: a token pays for itself and for what it leads to, within its sample). With `gae` the
share of each token, -beta * KL_t (arXiv 2402.03300, equation 2), becomes its `token_rewards` instead. KL comes after
the baseline: inside it, it would be the only difference between rollouts of equal reward, and dividing by the group's
spread would blow it up to the size of a reward. Everything is computed in float64 and rounded once, to float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from pipelinerl.config.algorithm import RLConfig
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.records import Sample
from pipelinerl.rl.advantages import NORM_EPSILON, are_equal, cuts_negative
from pipelinerl.rl.microbatch import MicroBatch, to_tokens


def finish_advantages(
    micro_batches: Sequence[MicroBatch], samples: Sequence[Sample], rl: RLConfig, ranks: Ranks
) -> list[MicroBatch]:
    """This rank's micro-batches, on the CPU, with the advantages that the loss uses.

    Waits for the other ranks if advantages are normalized.

    Args:
        samples: all samples of the step; a micro-batch's `indices` point into them.

    Raises:
        ValueError: KL is part of the reward and a micro-batch has no reference log-probs.
    """
    own = list(micro_batches)
    advantages = [_of_samples(batch, samples) for batch in own]
    if rl.reward_minus_kl_coef:
        rewards = [_kl_rewards(batch, rl.reward_minus_kl_coef) for batch in own]
        if rl.advantage_estimator == "gae":
            return [replace(batch, token_rewards=reward.float()) for batch, reward in zip(own, rewards, strict=True)]
        advantages = [a + _to_go(r, batch) for a, r, batch in zip(advantages, rewards, own, strict=True)]
    if rl.normalizes_over_step:
        advantages = _normalized(advantages, own, ranks)
    if cuts_negative(rl):
        advantages = [values.clamp(min=0.0) for values in advantages]
    return [
        replace(batch, advantages=torch.where(batch.mask, values, 0.0).float())
        for batch, values in zip(own, advantages, strict=True)
    ]


def _of_samples(batch: MicroBatch, samples: Sequence[Sample]) -> torch.Tensor:
    """Each sample's advantage at all its positions: [R, T] float64."""
    values = [samples[index].advantage or 0.0 for index in batch.indices] or [0.0]
    return to_tokens(torch.tensor(values, dtype=torch.float64), batch.segment_ids)


def _kl_rewards(batch: MicroBatch, coefficient: float) -> torch.Tensor:
    """-beta * KL_t of every trained token, 0 elsewhere: [R, T] float64."""
    if batch.ref_logprobs is None:
        raise ValueError(
            f"finetune.rl.reward_minus_kl_coef: got {coefficient} without reference log-probs, expected a reference "
            "model. Set finetune.rl.reference to auto, or the coefficient to 0"
        )
    difference = batch.old_logprobs.double() - batch.ref_logprobs.double()
    return -coefficient * torch.where(batch.mask, difference, 0.0)


def _to_go(values: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Sum of `values` [R, T] from each trained token to the end of its sample; 0 elsewhere."""
    result = torch.zeros_like(values)
    for segment in range(batch.num_segments):
        at = batch.mask & (batch.segment_ids == segment)
        result[at] = values[at].flip(0).cumsum(0).flip(0)
    return result


def _normalized(
    advantages: Sequence[torch.Tensor], micro_batches: Sequence[MicroBatch], ranks: Ranks
) -> list[torch.Tensor]:
    """(A - mean) / (std + 1e-8) over the trained tokens of all ranks; all 0 if they are equal up to rounding."""
    values = torch.cat([of_batch[batch.mask] for of_batch, batch in zip(advantages, micro_batches, strict=True)])
    has_any = values.numel() > 0
    count, total = ranks.sum([float(values.numel()), float(values.sum())])
    (low,) = ranks.min([float(values.min()) if has_any else math.inf])
    (high,) = ranks.max([float(values.max()) if has_any else -math.inf])
    mean = total / max(count, 1.0)
    (squares,) = ranks.sum([float((values - mean).square().sum())])
    if count == 0 or are_equal([low, high]):
        return [torch.zeros_like(of_batch) for of_batch in advantages]
    scale = math.sqrt(squares / count) + NORM_EPSILON
    return [(of_batch - mean) / scale for of_batch in advantages]
