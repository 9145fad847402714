"""What the trainer needs from a backend. Plain (DDP), DeepSpeed ZeRO and FSDP2 each fill this protocol.

Gradients: `backward` gets this rank's share of the step's loss. Over all micro-batches and ranks the shares SUM to the
loss, and so do the gradients; a backend whose library averages over ranks multiplies that back.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from pipelinerl.config import RunConfig
from pipelinerl.finetune.attention import Layout
from pipelinerl.finetune.policy import PolicyModel, PolicyOutputs
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.rl.microbatch import MicroBatch
from pipelinerl.weights.source import WeightSource


class Backend(Protocol):
    """One policy with its optimizer, spread over the ranks in some way."""

    policy: PolicyModel

    def forward(
        self,
        batch: MicroBatch,
        layout: Layout | None,
        temperature: float | None = None,
        *,
        is_last: bool = True,
    ) -> PolicyOutputs:
        """Outputs of one micro-batch on this rank's device. All ranks call it equally often. `is_last` as in
        `backward`, for libraries that have to know it before."""
        ...

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Add the gradient of `loss`. `is_last` marks the last micro-batch of the step; all ranks agree on it."""
        ...

    def step(self, learning_rate_factor: float) -> float:
        """Clip, update, clear gradients. Returns the gradient norm over all ranks before clipping.

        A step whose norm is not finite changes nothing and the returned norm says so; a backend that cannot undo it
        raises FloatingPointError.
        """
        ...

    def weight_source(self, dtype: torch.dtype, *, with_value_head: bool = False) -> WeightSource:
        """The whole model in checkpoint names, cast to `dtype`; gathered bucket by bucket if sharded. The value head
        never goes to servers, but belongs to an exported model."""
        ...

    def adapter_source(self, dtype: torch.dtype) -> WeightSource:
        """A and B of every adapter, alpha / r in B, cast to `dtype`: for servers that hold the frozen model."""
        ...

    def save(self, folder: Path) -> None:
        """Write this rank's share of weights and optimizer into `folder`."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, bit by bit. ValueError if it does not fit this model or number of ranks."""
        ...


BackendFactory = Callable[[PolicyModel, RunConfig, Ranks], Backend]


def create_backend(policy: PolicyModel, config: RunConfig, ranks: Ranks) -> Backend:
    """The backend that the configuration asks for (`backend.type`)."""
    if config.backend.type == "deepspeed":
        from pipelinerl.finetune.backends.deepspeed import DeepSpeedBackend

        return DeepSpeedBackend(policy, config, ranks)
    if config.backend.type == "fsdp":
        from pipelinerl.finetune.backends.fsdp import FSDPBackend

        return FSDPBackend(policy, config, ranks)
    from pipelinerl.finetune.backends.plain import PlainBackend

    return PlainBackend(policy, config.finetune, ranks)
