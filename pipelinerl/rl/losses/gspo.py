"""GSPO: one ratio for the whole sample (arXiv 2507.18071).

    s = exp(mean over the sample's trained tokens of log(pi / mu))
    loss_t = -min(s * A_t, clip(s, 1 - epsilon_low, 1 + epsilon_high) * A_t)

Every token of a sample is clipped or kept together. The paper averages over the tokens of a sample and then over
samples: `aggregation: sample_mean`. Its clip range is far narrower than PPO's (3e-4 and 4e-4).
"""

from __future__ import annotations

from pipelinerl.config.algorithm import GspoLoss
from pipelinerl.rl.loss import LossInputs, LossOutputs
from pipelinerl.rl.losses.ppo import clip_metrics, clipped_surrogate


def gspo(inputs: LossInputs, config: GspoLoss) -> LossOutputs:
    ratio = inputs.to_tokens(inputs.sample_mean(inputs.log_ratio()).exp())
    return LossOutputs(clipped_surrogate(ratio, inputs.advantages, config), clip_metrics(inputs, ratio, config))
