"""CISPO: clip the importance weight instead of the update (MiniMax-M1, arXiv 2506.13585).

    loss_t = -clip(r_t, 1 - epsilon_low, 1 + epsilon_high) * A_t * log pi(y_t)        no gradient through the clip

Every token keeps a gradient, however far off its ratio is. The default `reinforce` is the same without the lower bound
(set `epsilon_low` near 1 to have none, as in the paper). The paper averages over tokens: `aggregation: token`.
"""

from __future__ import annotations

from pipelinerl.config.algorithm import CispoLoss
from pipelinerl.rl.loss import LossInputs, LossOutputs


def cispo(inputs: LossInputs, config: CispoLoss) -> LossOutputs:
    ratio = inputs.log_ratio().detach().exp()
    weight = ratio.clamp(1 - config.epsilon_low, 1 + config.epsilon_high)
    metrics = {
        "rl/clip_fraction_low": inputs.token_mean((ratio < 1 - config.epsilon_low).float()),
        "rl/clip_fraction_high": inputs.token_mean((ratio > 1 + config.epsilon_high).float()),
    }
    return LossOutputs(-weight * inputs.advantages * inputs.new_logprobs, metrics)
