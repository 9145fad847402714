"""Every rank holds the whole model; DistributedDataParallel sums gradients over ranks. On a CPU or on GPUs."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from pipelinerl.config.finetune import FinetuneConfig
from pipelinerl.finetune.attention import Layout
from pipelinerl.finetune.backends.base import Backend, make_accelerator
from pipelinerl.finetune.policy import PolicyModel, PolicyOutputs
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.rl.microbatch import MicroBatch


class PlainBackend(Backend):
    def __init__(self, policy: PolicyModel, config: FinetuneConfig, ranks: Ranks) -> None:
        super().__init__(policy, config, ranks, make_accelerator(ranks))

    def forward(
        self, batch: MicroBatch, layout: Layout | None, temperature: float | None = None, *, is_last: bool = True
    ) -> PolicyOutputs:
        # DDP decides in the forward pass whether the backward pass that follows sums over ranks.
        with nullcontext() if is_last else self.accelerator.no_sync(self.module):
            return super().forward(batch, layout, temperature)

    def move_optimizer(self, device: torch.device) -> None:
        """Move the optimizer's state to `device`; it must be where the parameters are before the next `step`."""
        self._served.move_rests(device)
        for state in self.optimizer.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                if key in state:
                    state[key] = state[key].to(device)
