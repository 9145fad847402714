"""The plain backend: every rank holds the whole model; DistributedDataParallel adds up gradients over ranks.

Used by the trainer on 1..n processes, CPU or GPU. `backward` of the last micro-batch waits for the other ranks.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from pipelinerl.config.finetune import FinetuneConfig
from pipelinerl.finetune.attention import Layout
from pipelinerl.finetune.backends.tensor_files import (
    load_parameters,
    optimizer_tensors,
    parameter_tensors,
    read_tensors,
    restore_optimizer,
    write_tensors,
)
from pipelinerl.finetune.lora import merged_value, scaled, sends_merged, sent_scales
from pipelinerl.finetune.optimizer import make_adamw, set_learning_rate
from pipelinerl.finetune.policy import PolicyModel, PolicyOutputs
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.served_values import ServedValues, parameters_to_round
from pipelinerl.finetune.weight_names import adapter_name, checkpoint_name, export_name
from pipelinerl.rl.microbatch import MicroBatch
from pipelinerl.weights.source import ModuleSource, WeightSource


class PlainBackend:
    """See `Backend`. Parameters are fp32; products are in the policy's compute dtype.

    Between steps the parameters have values that servers can have (`served_values.py`); what is saved are the fp32
    master weights.
    """

    def __init__(self, policy: PolicyModel, config: FinetuneConfig, ranks: Ranks) -> None:
        self.policy = policy
        self._ranks = ranks
        self._max_norm = config.gradient_clipping_threshold
        self._named = [(name, p) for name, p in policy.named_parameters() if p.requires_grad]
        self._optimizer = make_adamw(self._named, config)
        self._module: torch.nn.Module = policy
        if ranks.world_size > 1:
            device_ids = [ranks.device.index] if ranks.device.type == "cuda" else None
            self._module = DistributedDataParallel(policy, device_ids=device_ids)
        # Behind DDP, which gives all ranks the weights of the first: their masters have to be the same too.
        rounded = parameters_to_round(
            policy.language_model, policy.compute_dtype, policy.served_dtype, is_merged=sends_merged(policy)
        )
        self._served = ServedValues(rounded, policy.served_dtype)

    def forward(
        self,
        batch: MicroBatch,
        layout: Layout | None,
        temperature: float | None = None,
        *,
        is_last: bool = True,
    ) -> PolicyOutputs:
        module = self._module
        # DDP decides in the forward pass whether the backward pass that follows adds up over ranks.
        reduces_later = isinstance(module, DistributedDataParallel) and not is_last
        with module.no_sync() if reduces_later else nullcontext():  # type: ignore[operator]
            outputs: PolicyOutputs = module(batch, layout, temperature)
        return outputs

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        # DDP averages gradients over ranks; the shares of the loss are meant to be summed.
        (loss * self._ranks.world_size).backward()

    def step(self, learning_rate_factor: float) -> float:
        gradients = [parameter.grad for _, parameter in self._named if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        value = float(norm)
        if math.isfinite(value):
            if self._max_norm is not None:
                torch.nn.utils.clip_grads_with_norm_([p for _, p in self._named], self._max_norm, norm)
            set_learning_rate(self._optimizer, learning_rate_factor)
            with self._served.masters():
                self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return value

    def weight_source(self, dtype: torch.dtype, *, with_value_head: bool = False) -> WeightSource:
        merged, masters = merged_value(self.policy), self._served.values_in(dtype)
        return ModuleSource(
            self.policy,
            dtype=dtype,
            rename=export_name if with_value_head else checkpoint_name,
            value_of=lambda name, parameter: merged(name, masters(name, parameter)),
        )

    def adapter_source(self, dtype: torch.dtype) -> WeightSource:
        masters, scales = self._served.values_in(dtype), sent_scales(self.policy)
        return ModuleSource(
            self.policy,
            dtype=dtype,
            rename=adapter_name,
            value_of=lambda name, parameter: scaled(masters(name, parameter), scales.get(id(parameter))),
        )

    def move_optimizer(self, device: torch.device) -> None:
        """Move the optimizer's state to `device`; it has to be where the parameters are before the next `step`."""
        self._served.move_rests(device)
        for state in self._optimizer.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                if key in state:
                    state[key] = state[key].to(device)

    def save(self, folder: Path) -> None:
        if self._ranks.is_first:
            with self._served.masters():
                # A frozen base is in the model folder already: what is trained is enough.
                write_tensors(folder / "model.safetensors", parameter_tensors(self._named))
            write_tensors(folder / "optimizer.safetensors", optimizer_tensors(self._named, self._optimizer))

    def load(self, folder: Path) -> None:
        with self._served.masters():
            load_parameters(self._named, read_tensors(folder / "model.safetensors"))
        restore_optimizer(self._named, self._optimizer, read_tensors(folder / "optimizer.safetensors"))
