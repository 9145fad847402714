"""The DeepSpeed backend: ZeRO stages 1, 2 and 3, with or without CPU offload, as `backend.config` says.

Forward, backward, step, save and (stage 3) every pass over the weights are collectives of all ranks. Training states
are DeepSpeed's own files.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from pipelinerl.config import RunConfig
from pipelinerl.config.deepspeed_file import read_deepspeed_file
from pipelinerl.config.resources import DeepSpeedSettings
from pipelinerl.finetune.attention import Layout
from pipelinerl.finetune.lora import has_adapters, merged_value, scaled, sent_scales, updates
from pipelinerl.finetune.optimizer import parameter_groups
from pipelinerl.finetune.policy import PolicyModel, PolicyOutputs
from pipelinerl.finetune.ranks import Ranks, ensure_process_group
from pipelinerl.finetune.weight_names import (
    BUCKET_BYTES,
    adapter_name,
    adapter_parameters,
    checkpoint_name,
    export_name,
    in_buckets,
    sent_parameters,
    tensor_metas,
)
from pipelinerl.rl.microbatch import MicroBatch
from pipelinerl.weights.source import Bucket, CollectiveSource, ModuleSource, WeightSource

_STATE_FOLDER = "deepspeed"
_TAG = "state"


class DeepSpeedBackend:
    """See `Backend`. Master weights are fp32 inside ZeRO; the module is in the policy's compute dtype."""

    #: How much of a sharded model is whole at once while it is sent.
    bucket_bytes = BUCKET_BYTES

    def __init__(self, policy: PolicyModel, config: RunConfig, ranks: Ranks) -> None:
        if ranks.device.type == "cpu":
            # Read by DeepSpeed when it is imported; without it a machine with a driver but no GPU is misjudged.
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        if ranks.device.type == "cpu":
            # DeepSpeed would compile a helper for collectives in shared memory at its first start: it needs a compiler
            # and half a minute, and a process killed meanwhile leaves a lock that every later one waits for.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        ensure_process_group(ranks)
        self.policy = policy
        self._ranks = ranks
        self._zero = deepspeed.zero
        assert isinstance(config.backend, DeepSpeedSettings)
        threshold = config.finetune.gradient_clipping_threshold
        settings = engine_settings(config.backend.config, threshold, policy.compute_dtype)
        self._stage = settings["zero_optimization"]["stage"]
        self._is_fused = is_offloaded(settings)
        finetune = config.finetune
        optimizer = torch.optim.AdamW(
            parameter_groups(policy.named_parameters(), finetune),
            lr=finetune.learning_rate,
            betas=(finetune.adam_beta1, finetune.adam_beta2),
            eps=finetune.adam_epsilon,
            # The loop over tensors would need two more copies of all weights in host memory, and take several times as
            # long.
            fused=self._is_fused or None,
        )
        self._base_lrs = [group["base_lr"] for group in optimizer.param_groups]
        self.engine, self._optimizer, _, _ = deepspeed.initialize(
            model=policy, optimizer=optimizer, config=settings, dist_init_required=False
        )
        if self._stage == 3 and policy.has_linear_head:
            # The head's weight is used by the policy's own forward, outside of the module that owns it.
            head = policy.language_model.get_output_embeddings()
            for parameter in head.parameters():
                deepspeed.zero.register_external_parameter(policy, parameter)

    def forward(
        self,
        batch: MicroBatch,
        layout: Layout | None,
        temperature: float | None = None,
        *,
        is_last: bool = True,
    ) -> PolicyOutputs:
        outputs: PolicyOutputs = self.engine(batch, layout, temperature)
        if not torch.is_grad_enabled():
            # What was kept whole and fetched ahead for the backward that does not come.
            self._shard_all()
        return outputs

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(is_last)
        # Gradients are averaged over ranks; the shares of the loss are meant to be summed.
        self.engine.backward(loss * self._ranks.world_size, scale_wrt_gas=False)

    def step(self, learning_rate_factor: float) -> float:
        for group, base_lr in zip(self._optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = base_lr * learning_rate_factor
        self.engine.step()
        norm = self.engine.get_global_grad_norm()
        if norm is None or not math.isfinite(float(norm)):
            raise FloatingPointError(
                f"gradient norm {norm}: DeepSpeed has applied it, so the weights are spoiled. "
                "Continue from the last training state with a lower learning rate or tighter clipping."
            )
        return float(norm)

    def weight_source(self, dtype: torch.dtype, *, with_value_head: bool = False) -> WeightSource:
        if self._stage < 3:
            return ModuleSource(
                self.policy,
                dtype=dtype,
                rename=export_name if with_value_head else checkpoint_name,
                value_of=merged_value(self.policy) if has_adapters(self.policy) else None,
            )
        parameters = sent_parameters(self.policy, with_value_head)
        table, value_of = updates(self.policy), merged_value(self.policy)

        def gather() -> Iterator[Bucket]:
            # DeepSpeed takes a parameter that is still being fetched for whole, and fails when it is to be sharded.
            self._shard_all()
            for part in in_buckets(parameters, dtype, self.bucket_bytes):
                added = [table[id(parameter)] for _, parameter in part if id(parameter) in table]
                needed = [*(parameter for _, parameter in part), *(p for update in added for p in (update.a, update.b))]
                with self._zero.GatheredParameters(needed):
                    is_first = self._ranks.is_first
                    yield [(name, value_of(name, p).detach().to(dtype)) for name, p in part] if is_first else []

        return CollectiveSource(
            tensor_metas(parameters, dtype), gather, lambda flag: bool(self._ranks.broadcast(int(flag)))
        )

    def adapter_source(self, dtype: torch.dtype) -> WeightSource:
        scales = sent_scales(self.policy)
        if self._stage < 3:
            return ModuleSource(
                self.policy,
                dtype=dtype,
                rename=adapter_name,
                value_of=lambda name, parameter: scaled(parameter, scales.get(id(parameter))),
            )
        parameters = adapter_parameters(self.policy)

        def gather() -> Iterator[Bucket]:
            self._shard_all()
            for part in in_buckets(parameters, dtype, self.bucket_bytes):
                with self._zero.GatheredParameters([parameter for _, parameter in part]):
                    full = [(name, scaled(p, scales.get(id(p))).to(dtype, copy=True)) for name, p in part]
                    yield full if self._ranks.is_first else []

        return CollectiveSource(
            tensor_metas(parameters, dtype), gather, lambda flag: bool(self._ranks.broadcast(int(flag)))
        )

    def _shard_all(self) -> None:
        """Wait for the parameters that are being fetched ahead of their use, and shard all of them again (stage 3)."""
        if self._stage == 3:
            self._optimizer.empty_partition_cache()

    def _frozen_sums(self) -> list[int]:
        """Sums of the words of this rank's frozen weights, if servers have to have the same. States hold them too."""
        frozen = [p for p in self.policy.parameters() if not p.requires_grad] if self.policy.sends_adapter else []
        shards = [getattr(parameter, "ds_tensor", parameter).detach() for parameter in frozen]
        words = {2: torch.int16, 4: torch.int32}
        return [int(shard.contiguous().view(words[shard.element_size()]).sum()) for shard in shards]

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder / _STATE_FOLDER), tag=_TAG)

    def load(self, folder: Path) -> None:
        frozen = self._frozen_sums()
        path, _ = self.engine.load_checkpoint(str(folder / _STATE_FOLDER), tag=_TAG)
        if path is None:
            raise ValueError(f"{folder}: no DeepSpeed state that fits this run")
        if self._frozen_sums() != frozen:
            raise ValueError(
                f"{folder}: its frozen weights are not those of the model folder, which servers read themselves with "
                "finetune.lora.sync=adapter: put the old weights back, or set finetune.lora.sync=merged"
            )
        for group in self._optimizer.param_groups:
            # A state from a run without it says that it is off.
            group["fused"] = self._is_fused or None


def engine_settings(name: str, clipping_threshold: float | None, compute_dtype: torch.dtype) -> dict[str, Any]:
    """The DeepSpeed configuration in the file `name` (`backend.config`), with what the trainer decides.

    Batch sizes only matter for DeepSpeed's own accounting: the trainer marks the end of every step itself.

    Raises:
        ConfigError: the file is no DeepSpeed configuration with ZeRO stage 1, 2 or 3.
    """
    settings = read_deepspeed_file(name)
    bf16 = compute_dtype == torch.bfloat16
    settings.update(
        train_micro_batch_size_per_gpu=1,
        gradient_accumulation_steps=1,
        gradient_clipping=clipping_threshold or 0.0,
        bf16={"enabled": bf16},
        fp16={"enabled": False},
        zero_force_ds_cpu_optimizer=False,
    )
    settings["data_types"] = {"grad_accum_dtype": "fp32"}
    settings.pop("train_batch_size", None)
    return settings


def is_offloaded(settings: Mapping[str, Any]) -> bool:
    """Whether the optimizer's state lives in host memory, where its step runs too."""
    offload = settings["zero_optimization"].get("offload_optimizer") or {}
    return str(offload.get("device", "none")) == "cpu"
