"""Advantages and loss of a value head (`advantage_estimator: gae`).

The group stage gives each sample its reward as its "advantage"; here it becomes the reward of the last trained token,
on top of `token_rewards` (KL in the reward). GAE over the values of the head (no gradient) gives every token its
advantage and its return.

    value loss_t = (V_t - return_t)^2 / 2
"""

from __future__ import annotations

from dataclasses import replace

import torch

from pipelinerl.config.algorithm import GaeAdvantage, RLConfig
from pipelinerl.rl.advantages import gae
from pipelinerl.rl.losses.base import LossInputs


def with_gae_advantages(inputs: LossInputs, config: RLConfig) -> tuple[LossInputs, torch.Tensor]:
    """Inputs with per-token advantages, and the return of every token [R, T].

    Raises:
        ValueError: there are no values.
    """
    if inputs.values is None or not isinstance(config.advantage, GaeAdvantage):
        raise ValueError(
            f"finetune.rl.advantage_estimator: got {config.advantage_estimator!r} without values, expected gae and a "
            "model with a value head"
        )
    values = inputs.values.detach().double().cpu()
    rewards, mask, segments = inputs.advantages.double().cpu(), inputs.mask.cpu(), inputs.segment_ids.cpu()
    earned = torch.zeros_like(values) if inputs.token_rewards is None else inputs.token_rewards.double().cpu()
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    for segment in range(inputs.num_segments):
        place = mask & (segments == segment)
        count = int(place.sum())
        if count:
            steps = earned[place].tolist()
            steps[-1] += rewards[place][-1].item()
            found, targets = gae(steps, values[place].tolist(), config.gamma, config.advantage.gae_lambda)
            advantages[place] = torch.tensor(found, dtype=torch.float64)
            returns[place] = torch.tensor(targets, dtype=torch.float64)
    if config.relu_log_p_weights:
        advantages.clamp_(min=0.0)
    like = inputs.advantages
    return replace(inputs, advantages=advantages.to(like)), returns.to(inputs.values)


def value_loss(values: torch.Tensor, returns: torch.Tensor) -> torch.Tensor:
    return (values - returns).square() / 2
