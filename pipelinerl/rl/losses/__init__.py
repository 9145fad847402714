"""Losses by name: `compute_loss(LossInputs, RLConfig, Coefficients) -> LossOutputs`."""

from pipelinerl.rl.losses.base import LossInputs, LossOutputs, TokenLoss
from pipelinerl.rl.losses.compose import POLICY_LOSSES, Coefficients, coefficients_at, compute_loss

__all__ = [
    "POLICY_LOSSES",
    "Coefficients",
    "LossInputs",
    "LossOutputs",
    "TokenLoss",
    "coefficients_at",
    "compute_loss",
]
