"""FSDP2: parameters, gradients and optimizer state are sharded over the ranks.

Every decoder layer is one unit that is gathered when it runs; embeddings, final norm and heads belong to the root, so a
tied head stays tied. Forward, backward, step, save and every pass over the weights are collectives of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from accelerate.utils import FullyShardedDataParallelPlugin, fsdp2_prepare_model
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from pipelinerl.config import RunConfig
from pipelinerl.config.resources import FSDPSettings
from pipelinerl.finetune.attention import Layout
from pipelinerl.finetune.backends.base import Backend, NamedParameter, Rename, make_accelerator
from pipelinerl.finetune.lora import ValueOf, has_adapters
from pipelinerl.finetune.policy import PolicyModel, PolicyOutputs, decoder_layers
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.sharded_model import has_parts, shard_parts
from pipelinerl.rl.microbatch import MicroBatch
from pipelinerl.weights.buffers import NamedTensors, WeightSource

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class FSDPBackend(Backend):
    """`backend.param_dtype` is the dtype in which parameters are gathered; shards are fp32.

    Gradients are reduced after every micro-batch, so no rank ever holds those of the whole model.
    """

    def __init__(self, policy: PolicyModel, config: RunConfig, ranks: Ranks) -> None:
        settings = config.backend
        assert isinstance(settings, FSDPSettings)
        self._gathered_dtype = _DTYPES[settings.param_dtype]
        if not (layers := decoder_layers(policy)):
            raise ValueError(f"{type(policy.language_model).__name__} has no list of layers, so FSDP cannot shard it")
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[type(layer).__name__ for layer in layers],
            mixed_precision_policy=MixedPrecisionPolicy(
                param_dtype=self._gathered_dtype,
                reduce_dtype=_DTYPES[settings.reduce_dtype],
                cast_forward_inputs=False,
            ),
            reshard_after_forward=True,
            cpu_ram_efficient_loading=False,
        )
        accelerator = make_accelerator(ranks, fsdp_plugin=plugin)
        if has_adapters(policy) and ranks.world_size > 1:
            # Randomly initialized: all ranks use the values of the first.
            for parameter in policy.parameters():
                if parameter.requires_grad and not isinstance(parameter, DTensor):
                    torch.distributed.broadcast(parameter.data, src=0)
        if has_parts(policy):
            shard_parts(policy, ranks, lambda: fsdp2_prepare_model(accelerator, policy))
        super().__init__(policy, config.finetune, ranks, accelerator)

    def _parameters_to_round(self) -> list[torch.nn.Parameter]:
        # Gathering in the servers' dtype rounds all parameters.
        return [] if self._gathered_dtype == self.policy.served_dtype else super()._parameters_to_round()

    def forward(
        self, batch: MicroBatch, layout: Layout | None, temperature: float | None = None, *, is_last: bool = True
    ) -> PolicyOutputs:
        outputs = super().forward(batch, layout, temperature)
        if not torch.is_grad_enabled():
            # Without a backward pass nothing else shards the root's parameters again.
            assert isinstance(self.module, FSDPModule)
            self.module.reshard()
        return outputs

    def _source(self, rename: Rename, dtype: torch.dtype, value_of: ValueOf) -> WeightSource:
        def gather(part: Sequence[NamedParameter]) -> NamedTensors:
            # Cast before it is gathered: half the bytes travel for bf16.
            return [(name, whole(value_of(name, parameter).detach().to(dtype))) for name, parameter in part]

        return self._gathered_source(rename, dtype, gather)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, gathered from the ranks if it is sharded (a collective)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
