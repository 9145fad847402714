"""The last stages of a step's advantages where the reference model is beside the trainer: KL, normalisation, cut.

Called by `StepRunner` on every rank, before the first forward pass. It does to tensors what
`preprocess/scoring.finish_step` does to lists if reference servers scored the samples. Waits for the other ranks if
the advantages are normalised over the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from pipelinerl.config.finetune import RLConfig
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.rl.advantages.base import are_equal
from pipelinerl.rl.advantages.batch_norm import NORM_EPSILON
from pipelinerl.rl.advantages.stages import cuts_negative, is_batch_normalized
from pipelinerl.rl.batch import MicroBatch
from pipelinerl.rl.kl_in_reward import with_kl_in_reward


def finish_advantages(micro_batches: Sequence[MicroBatch], rl: RLConfig, ranks: Ranks) -> list[MicroBatch]:
    """This rank's micro-batches, on the CPU, with the advantages that the loss takes.

    Raises:
        ValueError: KL is part of the reward and a micro-batch has no reference log-probs.
    """
    is_gae = rl.advantage_estimator == "gae"
    own = [with_kl_in_reward(batch, rl.reward_minus_kl_coef, as_token_rewards=is_gae) for batch in micro_batches]
    if is_batch_normalized(rl):
        own = _normalized(own, ranks)
    if cuts_negative(rl):
        own = [replace(batch, advantages=batch.advantages.clamp(min=0.0)) for batch in own]
    return own


def _normalized(micro_batches: Sequence[MicroBatch], ranks: Ranks) -> list[MicroBatch]:
    """(A - mean) / std over the trained tokens of all ranks; 0 if they are equal up to rounding (`batch_norm`)."""
    values = torch.cat([batch.advantages[batch.mask] for batch in micro_batches]).double()
    has_any = values.numel() > 0
    count, total = ranks.sum([float(values.numel()), float(values.sum())])
    (low,) = ranks.min([float(values.min()) if has_any else math.inf])
    (high,) = ranks.max([float(values.max()) if has_any else -math.inf])
    middle = total / max(count, 1.0)
    (squares,) = ranks.sum([float((values - middle).square().sum())])
    if count == 0 or are_equal([low, high]):
        return [replace(batch, advantages=torch.zeros_like(batch.advantages)) for batch in micro_batches]
    scale = math.sqrt(squares / count) + NORM_EPSILON

    def normalized(batch: MicroBatch) -> MicroBatch:
        advantages = torch.where(batch.mask, (batch.advantages.double() - middle) / scale, 0.0)
        return replace(batch, advantages=advantages.float())

    return [normalized(batch) for batch in micro_batches]
