"""The loss of one micro-batch: policy loss by name, importance correction, KL, entropy bonus, value loss.

KL(policy || reference) is estimated per token (J. Schulman, "Approximating KL Divergence", 2020). With
r = log ref - log new of a token that the policy sampled:
    k1 = -r             unbiased, can be negative; as a loss its expected gradient is zero: use it in the reward
    k2 = r^2 / 2        biased, low variance; as a loss its gradient is that of KL on-policy
    k3 = e^r - r - 1    unbiased, never negative, low variance
"""

from __future__ import annotations

import importlib
from typing import get_args

import torch

from pipelinerl.config.algorithm import GaeAdvantage, RLConfig
from pipelinerl.config.algorithm import PolicyLoss as LossConfig
from pipelinerl.config.section import DOTTED, Choice, Section
from pipelinerl.errors import ConfigError
from pipelinerl.rl.coefficients import Coefficients
from pipelinerl.rl.losses.base import LossInputs, Metrics, PolicyLoss
from pipelinerl.rl.losses.importance import correct
from pipelinerl.rl.losses.value import value_loss, with_gae_advantages
from pipelinerl.rl.user_function import load_function

#: One type in `config/algorithm.py` and one module with a function of the same name in this folder.
POLICY_LOSSES = sorted(Choice("policy_loss").members(get_args(LossConfig)[0]).keys() - {DOTTED})


def policy_loss_function(name: str) -> PolicyLoss:
    """The policy loss `name`, or the user's function at a dotted path.

    Raises:
        ConfigError: neither.
    """
    key = "finetune.rl.policy_loss"
    if name in POLICY_LOSSES:
        found: PolicyLoss = getattr(importlib.import_module(f"pipelinerl.rl.losses.{name}"), name)
        return found
    if "." in name:
        return load_function(key, name, LossInputs.api_version)
    raise ConfigError(key, name, f"one of {', '.join(POLICY_LOSSES)}", "Or name a function: package.module.name.")


def compute_loss(inputs: LossInputs, config: RLConfig, coefficients: Coefficients) -> tuple[torch.Tensor, Metrics]:
    """This micro-batch's share of the step's loss (0-d) and metrics: sums over micro-batches and ranks.

    Raises:
        ConfigError: unknown `policy_loss`.
        ValueError: a coefficient without the values that it needs.
    """
    returns = None
    if isinstance(config.advantage, GaeAdvantage):
        inputs, returns = with_gae_advantages(inputs, config)
    loss, metrics = _policy_term(inputs, config)
    for term, found in (
        _kl_term(inputs, config, coefficients.kl),
        _entropy_term(inputs, coefficients.entropy),
        _value_term(inputs, returns, config.advantage),
    ):
        metrics |= found
        if term is not None:
            loss = loss + term
    metrics["finetune/loss"] = loss.detach()  #: the whole loss of the step: policy, KL, entropy and value terms
    return loss, metrics


_Term = tuple[torch.Tensor | None, Metrics]


def _policy_term(inputs: LossInputs, config: RLConfig) -> tuple[torch.Tensor, Metrics]:
    corrected, factor, metrics = correct(inputs, config.correction)
    policy = policy_loss_function(config.policy_loss)(corrected, config.loss)
    per_token = policy.per_token if factor is None else policy.per_token * factor
    loss = weighted_sum(inputs, per_token)
    metrics = {**metrics, **policy.metrics}
    metrics["rl/policy_loss"] = loss.detach()  #: the policy term alone
    return loss, metrics


def _kl_term(inputs: LossInputs, config: RLConfig, coefficient: float) -> _Term:
    if inputs.ref_logprobs is None:
        if coefficient and inputs.num_segments:
            raise ValueError(
                f"finetune.rl.kl_coef: got {coefficient} without reference log-probs, expected a reference model. "
                "Set finetune.rl.reference to auto, or set kl_coef to 0"
            )
        return None, {}
    kl = token_kl(inputs.new_logprobs, inputs.ref_logprobs, config.kl_estimator, config.clamp_log_ratio_ref_new_value)
    metrics = {"rl/kl_reference": inputs.token_mean(kl)}  #: KL to the reference model per token (with a reference)
    return coefficient * weighted_sum(inputs, kl) if coefficient else None, metrics


def _entropy_term(inputs: LossInputs, coefficient: float) -> _Term:
    if inputs.entropy is None:
        if coefficient:
            raise ValueError("finetune.rl.entropy_bonus is not 0, but the forward pass computed no entropy")
        return None, {}
    bonus = -coefficient * weighted_sum(inputs, inputs.entropy) if coefficient else None
    return bonus, {"rl/entropy": inputs.token_mean(inputs.entropy)}


def _value_term(inputs: LossInputs, returns: torch.Tensor | None, estimator: Section) -> _Term:
    if returns is None or inputs.values is None or not isinstance(estimator, GaeAdvantage):
        return None, {}
    per_token = value_loss(inputs.values, returns)
    metrics = {
        "rl/value_loss": inputs.token_mean(per_token),  #: value head: half the squared error per token
        "rl/value_mean": inputs.token_mean(inputs.values),  #: value head: mean value
    }
    return estimator.value_loss_coef * weighted_sum(inputs, per_token), metrics


def weighted_sum(inputs: LossInputs, per_token: torch.Tensor) -> torch.Tensor:
    """Sum over trained tokens of weight * value; masked values (finite or not) add exactly 0."""
    return (torch.where(inputs.mask, per_token, torch.zeros_like(per_token)) * inputs.weights).sum()


def token_kl(new: torch.Tensor, ref: torch.Tensor, estimator: str = "k3", clamp: float = 5.0) -> torch.Tensor:
    """KL estimate of every token. Log-ratios are clamped to [-clamp, clamp] (no gradient beyond), so e^r is finite."""
    r = (ref - new).clamp(-clamp, clamp)
    if estimator == "k1":
        return -r
    if estimator == "k2":
        return r.square() / 2
    if estimator == "k3":
        # Near the reference e^r and 1 cancel: their difference in fp32 would be rounding, and often negative.
        return torch.expm1(r) - r
    raise ValueError(f"finetune.rl.kl_estimator: got {estimator!r}, expected k1, k2 or k3")
