"""The whole loss of one micro-batch: policy loss by name, KL penalty, entropy bonus.

Called by the trainer for every micro-batch. The result is this micro-batch's share of the step's loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pipelinerl.config.finetune import RLConfig
from pipelinerl.rl.kl import token_kl
from pipelinerl.rl.losses.base import LossInputs, LossOutputs, PolicyLoss
from pipelinerl.rl.losses.reinforce import reinforce
from pipelinerl.rl.metrics import TensorMetric
from pipelinerl.rl.schedule import linear_coefficient

POLICY_LOSSES: dict[str, PolicyLoss] = {"reinforce": reinforce}


@dataclass(frozen=True)
class Coefficients:
    """Values of the scheduled coefficients at one step."""

    kl: float
    entropy: float


def coefficients_at(config: RLConfig, step: int, max_steps: int) -> Coefficients:
    """KL and entropy coefficient of optimizer step `step` (from 1)."""
    return Coefficients(
        kl=linear_coefficient(config.kl_coef, config.final_kl_coef, step, max_steps),
        entropy=linear_coefficient(config.entropy_bonus, config.final_entropy_bonus, step, max_steps),
    )


def compute_loss(inputs: LossInputs, config: RLConfig, coefficients: Coefficients) -> LossOutputs:
    """Policy loss + KL penalty - entropy bonus, weighted and summed over the tokens of the micro-batch.

    Raises:
        ValueError: unknown `policy_loss`; a KL coefficient without reference log-probs; an entropy coefficient without
            entropy.
    """
    if config.policy_loss not in POLICY_LOSSES:
        raise ValueError(f"finetune.rl.policy_loss: got {config.policy_loss!r}, expected one of {list(POLICY_LOSSES)}")
    policy = POLICY_LOSSES[config.policy_loss](inputs, config)
    loss = weighted_sum(inputs, policy.per_token)
    metrics = {**policy.metrics, "rl/policy_loss": TensorMetric(loss.detach())}
    if inputs.ref_logprobs is not None:
        kl = token_kl(
            inputs.new_logprobs, inputs.ref_logprobs, config.kl_estimator, config.clamp_log_ratio_ref_new_value
        )
        metrics["rl/kl_reference"] = inputs.token_mean(kl)
        if coefficients.kl:
            loss = loss + coefficients.kl * weighted_sum(inputs, kl)
    elif coefficients.kl and inputs.num_segments:
        raise ValueError(
            f"finetune.rl.kl_coef: got {coefficients.kl} without reference log-probs, expected a reference model. "
            "Give the world a preprocessor pool or set kl_coef to 0"
        )
    if inputs.entropy is not None:
        metrics["rl/entropy"] = inputs.token_mean(inputs.entropy)
        if coefficients.entropy:
            loss = loss - coefficients.entropy * weighted_sum(inputs, inputs.entropy)
    elif coefficients.entropy:
        raise ValueError("finetune.rl.entropy_bonus is not 0, but the forward pass computed no entropy")
    metrics["rl/loss"] = TensorMetric(loss.detach())
    return LossOutputs(loss, metrics)


def weighted_sum(inputs: LossInputs, per_token: torch.Tensor) -> torch.Tensor:
    """Sum over trained tokens of weight * value; masked values (finite or not) add exactly 0."""
    return (torch.where(inputs.mask, per_token, torch.zeros_like(per_token)) * inputs.weights).sum()
