"""Decoupled PPO: clip around a recent policy, correct for the sampler separately (AReaL, arXiv 2505.24298).

    loss_t = -w_t * min(r_t * A_t, clip(r_t, 1 - epsilon_low, 1 + epsilon_high) * A_t)
    r_t = pi(y_t) / prox(y_t)        w_t = prox(y_t) / mu(y_t), at most `clamp`, no gradient

The proximal policy is the one before the weights in training (version v - 1). Its log-prob is not computed by another
forward pass but read off the versions: on the straight line, in log-probs, from the version b that sampled the token
to the weights in training v,

    log prox = log mu + a * (log pi - log mu)        a = (v - 1 - b) / (v - b), 0 for tokens of version v - 1 or v

so a fresh token is clipped as in PPO and an old one against a policy near the current one.
"""

from __future__ import annotations

import torch

from pipelinerl.config.algorithm import DecoupledPpoLoss
from pipelinerl.rl.loss import LossInputs, LossOutputs
from pipelinerl.rl.losses.ppo import clip_metrics, clipped_surrogate


def decoupled_ppo(inputs: LossInputs, config: DecoupledPpoLoss) -> LossOutputs:
    proximal = proximal_logprobs(inputs)
    ratio = inputs.log_ratio(proximal).exp()
    behavior = torch.where(inputs.mask, proximal - inputs.old_logprobs, 0.0).clamp(-20.0, 20.0).exp()
    weight = behavior.clamp(max=config.clamp)
    metrics = clip_metrics(inputs, ratio, config)
    #: decoupled PPO: mean weight prox / mu, at most the bound of the loss
    metrics["rl/behavior_weight_mean"] = inputs.token_mean(weight)
    #: decoupled PPO: share of tokens with such a weight above the bound
    metrics["rl/behavior_clip_fraction"] = inputs.token_mean((behavior > config.clamp).float())
    return LossOutputs(weight * clipped_surrogate(ratio, inputs.advantages, config), metrics)


def proximal_logprobs(inputs: LossInputs) -> torch.Tensor:
    """log prox of every token [R, T], without gradient."""
    lag = (inputs.trainer_version - inputs.versions).clamp(min=1).to(inputs.old_logprobs.dtype)
    share = (lag - 1) / lag
    return inputs.old_logprobs + share * (inputs.new_logprobs.detach() - inputs.old_logprobs)
