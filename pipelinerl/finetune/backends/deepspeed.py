"""DeepSpeed: ZeRO stages 1, 2 and 3, with or without CPU offload, as `backend.config` says.

Forward, backward, step, save and (stage 3) every pass over the weights are collectives of all ranks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DeepSpeedPlugin
from torch.distributed.tensor import DTensor

from pipelinerl.config import RunConfig
from pipelinerl.config.load import read_deepspeed_file
from pipelinerl.config.resources import DeepSpeedSettings
from pipelinerl.finetune.attention import Layout
from pipelinerl.finetune.backends.base import Backend, NamedParameter, Rename, make_accelerator
from pipelinerl.finetune.lora import ValueOf, updates
from pipelinerl.finetune.policy import PolicyModel, PolicyOutputs
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.sharded_model import has_parts, replace_parameters
from pipelinerl.finetune.tensor_files import STATE, flat_share, load_tensors, save_tensors, saved_names
from pipelinerl.rl.microbatch import MicroBatch
from pipelinerl.weights.buffers import NamedTensors, WeightSource

#: How many steps the optimizer took, for all parameters.
_STEP = "optimizer/step"


class DeepSpeedBackend(Backend):
    """Master weights are fp32 inside ZeRO; the module is in the policy's compute dtype."""

    def __init__(self, policy: PolicyModel, config: RunConfig, ranks: Ranks) -> None:
        if ranks.device.type == "cpu":
            # Read by DeepSpeed when it is imported; without it a machine with a driver but no GPU is misjudged.
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        if ranks.device.type == "cpu":
            # DeepSpeed would compile a helper for shared-memory collectives at its first start, which needs a compiler
            # and half a minute; a process killed meanwhile leaves a lock that blocks all later ones.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self._zero = deepspeed.zero
        assert isinstance(config.backend, DeepSpeedSettings)
        threshold = config.finetune.gradient_clipping_threshold
        settings = engine_settings(config.backend.config, threshold, policy.compute_dtype)
        self._stage = settings["zero_optimization"]["stage"]
        # On a CPU the loop over tensors would need two more copies of all weights, and take several times as long.
        self._is_fused = is_offloaded(settings) or None
        if has_parts(policy):
            _shard_parts(policy, settings, deepspeed.zero)
        plugin = DeepSpeedPlugin(hf_ds_config=settings, zero3_init_flag=False)
        super().__init__(
            policy, config.finetune, ranks, make_accelerator(ranks, deepspeed_plugin=plugin), fused=self._is_fused
        )
        if self._stage == 3 and policy.has_linear_head:
            # The head's weight is used by the policy's own forward, outside of the module that owns it.
            head = policy.language_model.get_output_embeddings()
            for parameter in head.parameters():
                deepspeed.zero.register_external_parameter(policy, parameter)

    def _parameters_to_round(self) -> list[torch.nn.Parameter]:
        # ZeRO keeps master weights itself and overwrites the parameters with them.
        return []

    def forward(
        self, batch: MicroBatch, layout: Layout | None, temperature: float | None = None, *, is_last: bool = True
    ) -> PolicyOutputs:
        outputs = super().forward(batch, layout, temperature)
        if not torch.is_grad_enabled():
            # Parameters gathered and prefetched for a backward pass that does not come.
            self._shard_all()
        return outputs

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        # Accelerate's backward of the last micro-batch takes the optimizer step too.
        self.accelerator.sync_gradients = is_last
        super().backward(loss, is_last=is_last)

    def step(self) -> float:
        norm = self.accelerator.clip_grad_norm_([], math.inf)
        if norm is None or not math.isfinite(float(norm)):
            raise FloatingPointError(
                f"gradient norm {norm}: DeepSpeed has applied it, so the weights are corrupted. "
                "Continue from the last training state with a lower learning rate or tighter clipping."
            )
        return float(norm)

    def _source(self, rename: Rename, dtype: torch.dtype, value_of: ValueOf) -> WeightSource:
        if self._stage < 3:
            return super()._source(rename, dtype, value_of)
        table = updates(self.policy)

        def gather(part: Sequence[NamedParameter]) -> NamedTensors:
            # DeepSpeed treats a parameter that is being fetched as whole, and fails to shard it.
            self._shard_all()
            added = [table[id(parameter)] for _, parameter in part if id(parameter) in table]
            needed = [*(parameter for _, parameter in part), *(p for update in added for p in (update.a, update.b))]
            with self._zero.GatheredParameters(needed):
                # Copied: what leaves the block is sharded again.
                return [(name, value_of(name, parameter).detach().to(dtype, copy=True)) for name, parameter in part]

        return self._gathered_source(rename, dtype, gather)

    def _shard_all(self) -> None:
        """Wait for prefetched parameters and shard all parameters again (stage 3)."""
        if self._stage == 3:
            self.module.optimizer.empty_partition_cache()

    def save(self, folder: Path) -> None:
        """Like other backends, under the same names; tensors are flat, as ZeRO partitions them."""
        save_tensors(folder / STATE, self._shares(), self._ranks)

    def load(self, folder: Path) -> None:
        keys = {name.rpartition("/")[2] for name in saved_names(folder / STATE) if name.startswith("optimizer/")}
        for masters in self._masters():
            # The first step would make them.
            begun = {key: torch.zeros(()) if key == "step" else torch.zeros_like(masters) for key in keys}
            self._adamw.state[masters].update(begun)
        shares = self._shares()
        load_tensors(folder / STATE, shares, self._ranks)
        for masters in self._masters() if keys else ():
            self._adamw.state[masters]["step"].copy_(shares[_STEP])
        self._spread_masters()

    @property
    def _adamw(self) -> torch.optim.Optimizer:
        adamw: torch.optim.Optimizer = self.module.optimizer.optimizer
        return adamw

    def _masters(self) -> list[torch.Tensor]:
        """This rank's share of the fp32 master weights: flat tensors of many parameters."""
        if self._stage == 3:
            return list(self.module.optimizer.fp32_partitioned_groups_flat)
        return [flat for group in self._adamw.param_groups for flat in group["params"]]

    def _shares(self) -> dict[str, torch.Tensor]:
        """This rank's pieces of the flat master weights and moments of each trained parameter."""
        masters = self._masters()
        states = [self._adamw.state.get(flat, {}) for flat in masters]
        tensors = {_STEP: states[0]["step"]} if states[0] else {}
        for name, parameter in self._named:
            number, start, count, offset = self._piece_of(parameter)
            kinds = {f"model/{name}": masters[number]}
            moments = {key: value for key, value in states[number].items() if key != "step"}
            kinds |= {f"optimizer/{name}/{key}": value for key, value in moments.items()}
            for saved, flat in kinds.items():
                piece = flat.detach().narrow(0, start, count)
                total = getattr(parameter, "ds_numel", parameter.numel())
                tensors[saved] = flat_share(piece, offset, total, self._ranks)
        return tensors

    def _piece_of(self, parameter: Any) -> tuple[int, int, int, int]:
        """Where this rank has a piece of `parameter`: number of the flat tensor, its first element there, how many, and
        the first element in the parameter."""
        if self._stage < 3:
            piece = parameter._hp_mapping
            if piece is None:
                return 0, 0, 0, 0
            address = piece.hp_fragment_address
            return piece.param_group_index, address.start, address.numel, piece.lp_fragment_address.start
        zero = self.module.optimizer
        number, start, size = zero.grad_position[zero.get_param_id(parameter)]
        offset = min(size * parameter.ds_zero_partition_rank, parameter.ds_numel)
        # The last pieces are padded.
        return number, start, min(size, parameter.ds_numel - offset), offset

    def _spread_masters(self) -> None:
        """Round the master weights into the parameters, as after a step."""
        zero = self.module.optimizer
        if self._stage < 3:
            zero.update_lp_params()
            return
        # Small parameters stay whole between steps.
        zero.checkpoint_event_prologue()
        for rounded, masters in zip(zero.fp16_partitioned_groups_flat, self._masters(), strict=True):
            rounded.data.copy_(masters.data)
        zero.checkpoint_event_epilogue()


def engine_settings(name: str, clipping_threshold: float | None, compute_dtype: torch.dtype) -> dict[str, Any]:
    """The DeepSpeed configuration in the file `name` (`backend.config`), with the trainer's own settings.

    Batch sizes only matter for DeepSpeed's own accounting: the trainer marks the end of every step itself.

    Raises:
        ConfigError: the file is not a DeepSpeed configuration with ZeRO stage 1, 2 or 3.
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


def _shard_parts(policy: PolicyModel, settings: Mapping[str, Any], zero: Any) -> None:
    """Let ZeRO-3 shard a policy that is in parts, gathering one parameter at a time."""
    dtype = torch.bfloat16 if settings["bf16"]["enabled"] else torch.float32
    sharded: list[Any] = []

    def shard(name: str, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        value: Any = parameter.detach().to(dtype)
        value = value.full_tensor() if isinstance(value, DTensor) else value
        new: Any = torch.nn.Parameter(value, requires_grad=parameter.requires_grad)
        if sharded:
            sharded[0].convert_to_zero_parameters(param_list=[new])
        else:
            zero.Init(module=torch.nn.ParameterList([new]), config_dict_or_path=_without_auto(settings), dtype=dtype)
            sharded.append(new)
        return new  # type: ignore[no-any-return]

    replace_parameters(policy, shard)


def _without_auto(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` without the values that accelerate fills in once it knows the model."""
    return {
        key: _without_auto(value) if isinstance(value, Mapping) else value
        for key, value in settings.items()
        if value != "auto"
    }


def is_offloaded(settings: Mapping[str, Any]) -> bool:
    """Whether the optimizer's state lives in host memory, where its step runs too."""
    offload = settings["zero_optimization"].get("offload_optimizer") or {}
    return str(offload.get("device", "none")) == "cpu"
