"""Losses by name: `compute_loss(LossInputs, RLConfig, Coefficients) -> (loss, metrics)`."""

from pipelinerl.rl.losses.base import LossInputs, LossOutputs, Metrics
from pipelinerl.rl.losses.compose import POLICY_LOSSES, compute_loss, policy_loss_function

__all__ = ["POLICY_LOSSES", "LossInputs", "LossOutputs", "Metrics", "compute_loss", "policy_loss_function"]
