"""GSPO: one ratio for the whole sample (arXiv 2507.18071).

    s = exp(mean over the sample's trained tokens of log(pi / mu))
    loss_t = -min(s * A_t, clip(s, 1 - epsilon_low, 1 + epsilon_high) * A_t)

Every token of a sample is clipped or kept together. The paper averages over the tokens of a sample and then over
samples: `aggregation: sample_mean`. Its clip range is far narrower than PPO's (3e-4 and 4e-4).
"""

from __future__ import annotations

from pipelinerl.config.finetune import RLConfig
from pipelinerl.rl.losses.base import LossInputs, TokenLoss
from pipelinerl.rl.losses.ppo import clip_metrics, clipped_surrogate
from pipelinerl.rl.microbatch import segment_mean, to_tokens


def gspo(inputs: LossInputs, config: RLConfig) -> TokenLoss:
    mean = segment_mean(inputs.log_ratio(), inputs.mask, inputs.segment_ids, inputs.num_segments)
    ratio = to_tokens(mean.exp(), inputs.segment_ids)
    return TokenLoss(clipped_surrogate(ratio, inputs.advantages, config), clip_metrics(inputs, ratio, config))
