"""PPO with a clip range that may differ up and down (Schulman et al. arXiv 1707.06347; clip-higher: DAPO 2503.14476).

    loss_t = -min(r_t * A_t, clip(r_t, 1 - epsilon_low, 1 + epsilon_high) * A_t)        r_t = pi(y_t) / mu(y_t)

Dual clip (arXiv 1912.09729), if `dual_clip` = c is set: where A_t < 0 the loss is at most -c * A_t, so that one token
with a huge ratio cannot dominate.
"""

from __future__ import annotations

import torch

from pipelinerl.config.algorithm import PpoLoss
from pipelinerl.rl.loss import LossInputs, LossOutputs, Metrics


def ppo(inputs: LossInputs, config: PpoLoss) -> LossOutputs:
    ratio = inputs.log_ratio().exp()
    return LossOutputs(clipped_surrogate(ratio, inputs.advantages, config), clip_metrics(inputs, ratio, config))


def clipped_surrogate(ratio: torch.Tensor, advantages: torch.Tensor, config: PpoLoss) -> torch.Tensor:
    """The loss above for any ratio that broadcasts to the tokens."""
    clipped = ratio.clamp(1 - config.epsilon_low, 1 + config.epsilon_high)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    if config.dual_clip is not None:
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, config.dual_clip * advantages), surrogate)
    return -surrogate


def clip_metrics(inputs: LossInputs, ratio: torch.Tensor, config: PpoLoss) -> Metrics:
    """Share of tokens whose gradient the clip removes, by sign of the advantage."""
    ratio = ratio.detach()
    low = (ratio < 1 - config.epsilon_low) & (inputs.advantages < 0)
    high = (ratio > 1 + config.epsilon_high) & (inputs.advantages > 0)
    return {
        #: share of tokens at the lower bound of the loss (PPO, GSPO: those without gradient)
        "rl/clip_fraction_low": inputs.token_mean(low.float()),
        "rl/clip_fraction_high": inputs.token_mean(high.float()),  #: share of tokens at the upper bound
    }
