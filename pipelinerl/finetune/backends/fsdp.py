"""The FSDP2 backend: parameters, gradients and optimizer state are sharded over the ranks (`fully_shard`).

Every decoder layer is one unit that is gathered when it runs; embeddings, final norm and heads belong to the root, so a
tied head stays tied. Forward, backward, step, save and every pass over the weights are collectives of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from pipelinerl.config import RunConfig
from pipelinerl.config.resources import FSDPSettings
from pipelinerl.finetune.attention import Layout
from pipelinerl.finetune.backends.tensor_files import (
    load_parameters,
    optimizer_tensors,
    parameter_tensors,
    read_tensors,
    restore_optimizer,
    write_tensors,
)
from pipelinerl.finetune.lora import Update, has_adapters, scaled, sends_merged, sent_scales, updates
from pipelinerl.finetune.optimizer import make_adamw, set_learning_rate
from pipelinerl.finetune.policy import PolicyModel, PolicyOutputs, backbone
from pipelinerl.finetune.ranks import Ranks, ensure_process_group
from pipelinerl.finetune.served_values import ServedValues, parameters_to_round
from pipelinerl.finetune.weight_names import (
    BUCKET_BYTES,
    NamedParameter,
    adapter_parameters,
    in_buckets,
    sent_parameters,
    tensor_metas,
)
from pipelinerl.rl.microbatch import MicroBatch
from pipelinerl.weights.source import Bucket, CollectiveSource, WeightSource

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class FSDPBackend:
    """See `Backend`. `backend.param_dtype` is the dtype in which parameters are gathered.

    Shards are fp32 and between steps have values that servers can have (`served_values.py`); what is saved are the
    fp32 master weights.
    """

    #: How much of the model is whole at once while it is sent.
    bucket_bytes = BUCKET_BYTES

    def __init__(self, policy: PolicyModel, config: RunConfig, ranks: Ranks) -> None:
        ensure_process_group(ranks)
        self.policy = policy
        self._ranks = ranks
        self._max_norm = config.finetune.gradient_clipping_threshold
        if has_adapters(policy) and ranks.world_size > 1:
            # Drawn at random; every rank keeps its share of what the first one drew.
            for parameter in policy.parameters():
                if parameter.requires_grad:
                    torch.distributed.broadcast(parameter.data, src=0)
        mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
        settings = config.backend
        assert isinstance(settings, FSDPSettings)
        precision = MixedPrecisionPolicy(
            param_dtype=_DTYPES[settings.param_dtype],
            reduce_dtype=_DTYPES[settings.reduce_dtype],
            cast_forward_inputs=False,
        )
        for layer in decoder_layers(policy):
            fully_shard(layer, mesh=mesh, mp_policy=precision)
        fully_shard(policy, mesh=mesh, mp_policy=precision)
        assert isinstance(policy, FSDPModule)
        self._sharded: FSDPModule = policy
        self._named = [(name, p) for name, p in policy.named_parameters() if p.requires_grad]
        # Gathered in the servers' dtype, every parameter is rounded on the way.
        rounded = (
            parameters_to_round(
                policy.language_model, policy.compute_dtype, policy.served_dtype, is_merged=sends_merged(policy)
            )
            if precision.param_dtype != policy.served_dtype
            else []
        )
        self._served = ServedValues(rounded, policy.served_dtype)
        self._optimizer = make_adamw(self._named, config.finetune)

    def forward(
        self,
        batch: MicroBatch,
        layout: Layout | None,
        temperature: float | None = None,
        *,
        is_last: bool = True,
    ) -> PolicyOutputs:
        outputs: PolicyOutputs = self.policy(batch, layout, temperature)
        if not torch.is_grad_enabled():
            # Without a backward nothing would shard the root's parameters again.
            self._sharded.reshard()
        return outputs

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        # Gradients are averaged over ranks; the shares of the loss are meant to be summed. Reducing after every
        # micro-batch keeps gradients sharded: no rank ever holds those of the whole model.
        (loss * self._ranks.world_size).backward()

    def step(self, learning_rate_factor: float) -> float:
        gradients = [parameter.grad for _, parameter in self._named if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
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
        parameters = sent_parameters(self.policy, with_value_head)
        table = updates(self.policy)

        def gather() -> Iterator[Bucket]:
            for part in in_buckets(parameters, dtype, self.bucket_bytes):
                yield self._gathered(part, dtype, table)

        return CollectiveSource(
            tensor_metas(parameters, dtype), gather, lambda flag: bool(self._ranks.broadcast(int(flag)))
        )

    def adapter_source(self, dtype: torch.dtype) -> WeightSource:
        parameters, scales = adapter_parameters(self.policy), sent_scales(self.policy)
        value_of = self._served.values_in(dtype)

        def gather() -> Iterator[Bucket]:
            for part in in_buckets(parameters, dtype, self.bucket_bytes):
                full = [(name, scaled(whole(value_of(name, p)), scales.get(id(p))).to(dtype)) for name, p in part]
                yield full if self._ranks.is_first else []

        return CollectiveSource(
            tensor_metas(parameters, dtype), gather, lambda flag: bool(self._ranks.broadcast(int(flag)))
        )

    def _gathered(self, part: list[NamedParameter], dtype: torch.dtype, table: dict[int, Update]) -> Bucket:
        bucket = []
        value_of = self._served.values_in(dtype)
        for name, parameter in part:
            update = table.get(id(parameter))
            if update is None:
                # Cast the shard first: half the bytes travel for bf16.
                full = whole(value_of(name, parameter).detach().to(dtype))
            else:
                full = (whole(parameter).float() + update.value(whole)).to(dtype)
            if self._ranks.is_first:
                bucket.append((name, full))
        return bucket

    def save(self, folder: Path) -> None:
        rank = self._ranks.rank
        # A frozen base is in the model folder already: what is trained is enough.
        with self._served.masters():
            write_tensors(folder / f"model_{rank}.safetensors", parameter_tensors(self._named))
        write_tensors(folder / f"optimizer_{rank}.safetensors", optimizer_tensors(self._named, self._optimizer))

    def load(self, folder: Path) -> None:
        rank = self._ranks.rank
        with self._served.masters():
            load_parameters(self._named, read_tensors(folder / f"model_{rank}.safetensors"))
        restore_optimizer(self._named, self._optimizer, read_tensors(folder / f"optimizer_{rank}.safetensors"))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, gathered from the ranks if it is sharded (a collective)."""
    kept = tensor.detach()
    return kept.full_tensor() if isinstance(kept, DTensor) else kept


def decoder_layers(policy: PolicyModel) -> list[torch.nn.Module]:
    """The repeated blocks of the model: what its longest `ModuleList` holds."""
    lists = [
        [*module] for module in backbone(policy.language_model).modules() if isinstance(module, torch.nn.ModuleList)
    ]
    if not lists:
        raise ValueError(f"{type(policy.language_model).__name__} has no list of layers, so FSDP cannot shard it")
    return max(lists, key=len)
