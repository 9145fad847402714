"""REINFORCE with truncated importance weights (PipelineRL, arXiv 2509.19128): the default.

    loss = -(1/B) * sum_t min(w_t, c) * A_t * log pi(y_t)        w_t = pi(y_t) / mu(y_t), no gradient through w

mu is the policy version that sampled the token, c = `finetune.rl.clamp` (5 in the paper). The published code clamps at
1 + epsilon_high = 1.02 instead; set `clamp: 1.02` for the same behavior.
"""

from __future__ import annotations

from pipelinerl.config.algorithm import ReinforceLoss
from pipelinerl.rl.loss import LossInputs, LossOutputs


def reinforce(inputs: LossInputs, config: ReinforceLoss) -> LossOutputs:
    ratio = inputs.log_ratio().detach().exp()
    weight = ratio.clamp(max=config.clamp)
    per_token = -weight * inputs.advantages * inputs.new_logprobs
    metrics = {"rl/clip_fraction_high": inputs.token_mean((ratio > config.clamp).float())}
    return LossOutputs(per_token, metrics)
