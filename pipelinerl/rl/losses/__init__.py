"""The policy losses, a file each. What they get, and the rest of the loss of a micro-batch, is in `rl/loss.py`."""

from pipelinerl.rl.loss import LossInputs, LossOutputs

__all__ = ["LossInputs", "LossOutputs"]
