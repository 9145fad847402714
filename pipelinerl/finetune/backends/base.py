"""The policy and its optimizer on several ranks, through `accelerate.Accelerator`. One subclass per kind; the plain one
(DDP) is here, those that shard have files of their own.

Gradients: `backward` gets this rank's share of the step's loss. Shares and gradients of all micro-batches and ranks are
summed. Accelerate's libraries average over ranks, so the share is multiplied by their number; accumulation over
micro-batches is a plain sum (`gradient_accumulation_steps` stays 1).

What accelerate does not do is done here:
- The learning rate comes from our schedule (`optimizer.Schedule`): a wrapped scheduler steps once per process.
- Training states hold what is trained, as data: `save_state` writes frozen weights too, and random states as pickles.
- DeepSpeed and FSDP2 on a CPU, which the tests train with (`make_accelerator`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DeepSpeedPlugin, DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor

from pipelinerl.config.finetune import FinetuneConfig
from pipelinerl.finetune.attention import Layout
from pipelinerl.finetune.lora import (
    ValueOf,
    adapter_name,
    has_adapters,
    merged_value,
    scaled,
    sends_merged,
    sent_scales,
)
from pipelinerl.finetune.optimizer import make_adamw
from pipelinerl.finetune.policy import PolicyModel, PolicyOutputs
from pipelinerl.finetune.ranks import Ranks, ensure_process_group
from pipelinerl.finetune.served_weights import (
    CheckpointForm,
    ServedValues,
    checkpoint_name,
    export_name,
    parameters_to_round,
)
from pipelinerl.finetune.tensor_files import STATE, load_tensors, save_tensors, saved_names
from pipelinerl.rl.microbatch import MicroBatch
from pipelinerl.weights.buffers import (
    ModuleSource,
    NamedTensors,
    TensorMeta,
    WeightSource,
    plan_chunks,
    saved_buffers,
)

NamedParameter = tuple[str, torch.nn.Parameter]
Rename = Callable[[str], str | None]


class Backend:
    """One policy with its optimizer. Parameters are fp32; products are in the policy's compute dtype.

    Between steps the parameters have values that servers can have (`served_weights.py`); what is saved are the fp32
    master weights. All ranks call every method at the same place.
    """

    #: How much of a sharded model is gathered at once while it is sent.
    bucket_bytes = 256 * 2**20

    def __init__(
        self,
        policy: PolicyModel,
        config: FinetuneConfig,
        ranks: Ranks,
        accelerator: Accelerator,
        fused: bool | None = None,
    ) -> None:
        self.policy = policy
        self.accelerator = accelerator
        self._ranks = ranks
        self._max_norm = config.gradient_clipping_threshold
        self.module: Any
        self.optimizer: Any
        self.module, self.optimizer = accelerator.prepare(policy, make_adamw(policy.named_parameters(), config, fused))
        sent = (checkpoint_name(name) for name, _ in (*policy.named_parameters(), *saved_buffers(policy)))
        self._form = CheckpointForm(policy.language_model, [name for name in sent if name is not None])
        # After DDP, which gives all ranks the weights of the first, and after sharding.
        self._named = [(name, p) for name, p in policy.named_parameters() if p.requires_grad]
        self._served = ServedValues(self._parameters_to_round(), policy.served_dtype)

    def _parameters_to_round(self) -> list[torch.nn.Parameter]:
        policy = self.policy
        return parameters_to_round(
            policy.language_model, policy.compute_dtype, policy.served_dtype, is_merged=sends_merged(policy)
        )

    def set_learning_rate(self, factor: float) -> None:
        """Multiply every group's base learning rate by `factor`. Before the micro-batches of a step."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor

    def forward(
        self, batch: MicroBatch, layout: Layout | None, temperature: float | None = None, *, is_last: bool = True
    ) -> PolicyOutputs:
        """Outputs of one micro-batch on this rank's device. `is_last` as in `backward`."""
        outputs: PolicyOutputs = self.module(batch, layout, temperature)
        return outputs

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Add the gradient of `loss`. `is_last` marks the last micro-batch of the step; all ranks agree on it."""
        self.accelerator.backward(loss * self._ranks.world_size)

    def step(self) -> float:
        """Clip, update, clear gradients. Returns the gradient norm over all ranks before clipping.

        If it is not finite nothing is changed; a backend that cannot undo the step raises FloatingPointError.
        """
        max_norm = math.inf if self._max_norm is None else self._max_norm
        norm = self.accelerator.clip_grad_norm_([parameter for _, parameter in self._named], max_norm)
        value = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if math.isfinite(value):
            with self._served.masters():
                self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return value

    def update_source(self) -> WeightSource:
        """What servers get: the adapter alone or the whole model, in the dtype of their weights."""
        source_of = self.adapter_source if self.policy.sends_adapter else self.weight_source
        return source_of(self.policy.served_dtype)

    def weight_source(self, dtype: torch.dtype, *, with_value_head: bool = False) -> WeightSource:
        """The whole model in checkpoint names, adapters merged, cast to `dtype`; gathered bucket by bucket if sharded.
        The value head belongs to an exported model only."""
        masters = self._served.values_in(dtype)
        value_of = merged_value(self.policy, masters) if has_adapters(self.policy) else masters
        return self._form.applied_to(self._source(export_name if with_value_head else checkpoint_name, dtype, value_of))

    def export_source(self) -> WeightSource:
        """The weights of an exported model, in the dtype that products are computed in."""
        return self.weight_source(self.policy.compute_dtype, with_value_head=True)

    def adapter_source(self, dtype: torch.dtype) -> WeightSource:
        """A and B of every adapter, alpha / r in B, cast to `dtype`: for servers that hold the frozen model."""
        masters, scales = self._served.values_in(dtype), sent_scales(self.policy)
        return self._source(
            lambda name: adapter_name(name, self._form.renamed),
            dtype,
            lambda name, parameter: scaled(masters(name, parameter), scales.get(id(parameter))),
        )

    def _source(self, rename: Rename, dtype: torch.dtype, value_of: ValueOf) -> WeightSource:
        return ModuleSource(self.policy, dtype, rename, value_of)

    def _gathered_source(
        self, rename: Rename, dtype: torch.dtype, gather: Callable[[Sequence[NamedParameter]], NamedTensors]
    ) -> WeightSource:
        """The source of a sharded model; `gather` is a collective that gathers some parameters. Buffers are whole."""
        sent = ((rename(name), parameter) for name, parameter in self.policy.named_parameters())
        parameters = {name: parameter for name, parameter in sent if name is not None}
        # DeepSpeed keeps a shard in place of the parameter, and its shape next to it.
        shapes = ((name, tuple(getattr(p, "ds_shape", p.shape))) for name, p in parameters.items())
        metas = [TensorMeta(name, dtype, shape) for name, shape in shapes]
        saved = ((rename(name), buffer) for name, buffer in saved_buffers(self.policy))
        buffers = [(name, buffer.detach()) for name, buffer in saved if name is not None]

        def buckets() -> Iterator[NamedTensors]:
            for chunk in plan_chunks(metas, self.bucket_bytes):
                bucket = gather([(meta.name, parameters[meta.name]) for meta in chunk])
                yield bucket if self._ranks.is_first else []
            yield buffers if self._ranks.is_first else []

        sent_metas = [*metas, *(TensorMeta(name, buffer.dtype, tuple(buffer.shape)) for name, buffer in buffers)]
        return WeightSource(sent_metas, buckets, lambda flag: bool(self._ranks.broadcast(int(flag))))

    def save(self, folder: Path) -> None:
        """Write this rank's share of trained parameters and optimizer state into `folder`: safetensors files of
        `torch.distributed.checkpoint`, which any number of ranks can load. Raises OSError."""
        with self._served.masters():
            # A frozen base is in the model folder already.
            tensors = {f"model/{name}": parameter.detach() for name, parameter in self._named}
            for name, parameter in self._named:
                state = self.optimizer.state.get(parameter, {})
                tensors |= {f"optimizer/{name}/{key}": value for key, value in state.items()}
            save_tensors(folder / STATE, tensors, self._ranks)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, bit by bit. ValueError if it does not fit this model."""
        tensors = {f"model/{name}": parameter.detach() for name, parameter in self._named}
        parameters, states = dict(self._named), []
        for saved in saved_names(folder / STATE):
            kind, _, name = saved.partition("/")
            if kind == "optimizer":
                name, _, key = name.rpartition("/")
                if name not in parameters:
                    raise ValueError(f"{folder}: optimizer state of unknown parameter {name}")
                tensors[saved] = torch.zeros(()) if key == "step" else torch.zeros_like(parameters[name]).detach()
                states.append((parameters[name], key, tensors[saved]))
        with self._served.masters():
            load_tensors(folder / STATE, tensors, self._ranks)
        for parameter, key, value in states:
            self.optimizer.state[parameter][key] = value


class PlainBackend(Backend):
    """Every rank holds the whole model; DistributedDataParallel sums gradients over ranks. On a CPU or on GPUs."""

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


def make_accelerator(
    ranks: Ranks,
    deepspeed_plugin: DeepSpeedPlugin | None = None,
    fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
) -> Accelerator:
    """An accelerator on this rank's device and in the process group of `ranks`."""
    on_cpu = ranks.device.type == "cpu"
    if deepspeed_plugin is not None or fsdp_plugin is not None or "LOCAL_RANK" in os.environ:
        # Without a group accelerate starts one at MASTER_PORT, which may be taken.
        ensure_process_group(ranks)
        # It requires an address although the group exists.
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    # Keep accelerate from changing the number of threads.
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    # It would derive DDP's device from the local rank, but a rank may see only its own GPU, as number 0.
    os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
    accelerator = Accelerator(cpu=on_cpu, deepspeed_plugin=deepspeed_plugin, fsdp_plugin=fsdp_plugin)
    if on_cpu and (deepspeed_plugin is not None or fsdp_plugin is not None):
        # Accelerate ignores both plugins on a CPU, although what it calls for them works there; the tests rely on it.
        state: Any = accelerator.state
        if deepspeed_plugin is not None:
            deepspeed_plugin.select(_from_accelerator_state=True)
            state.deepspeed_plugins = deepspeed_plugin
        else:
            state.fsdp_plugin = fsdp_plugin
        # The second overwrites the first whenever a state is created.
        kind = DistributedType.DEEPSPEED if deepspeed_plugin is not None else DistributedType.FSDP
        state.distributed_type = PartialState().distributed_type = kind
    return accelerator
