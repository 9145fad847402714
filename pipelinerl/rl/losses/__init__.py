"""The policy losses, a file each. Their inputs and the rest of the loss are in `rl/loss.py`."""

from pipelinerl.rl.loss import LossInputs, LossOutputs

__all__ = ["LossInputs", "LossOutputs"]
