"""What servers get of the trainer's weights: values of the servers' dtype, under the names and in the form of the
checkpoint.

Values: servers hold weights in 16 bits. A trainer that computes with fp32 weights follows another policy than the one
that sampled: it sees the part of every update that rounding removes, and the difference grows from step to step. So the
forward and backward passes run on the rounded values, as in all mixed precision training (Micikevicius et al. 2018,
section 3.1), and the optimizer updates the sums, the fp32 master weights. Products in bf16 round the matrices of linear
layers by themselves. What else a model computes with is rounded here: norms and other vectors, embeddings, experts that
do not follow autocast. With products in fp32 or TF32 it is every parameter.

Form: transformers keeps some models in another form than their checkpoints: all experts of a layer are one tensor, or a
family has other names. It converts while it loads, and back in `save_pretrained`, which needs the whole model at once.
Here the same conversions are reversed group by group, as soon as the tensors of a group are there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)
from transformers.pytorch_utils import Conv1D

from pipelinerl.config import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.finetune.experts import own_experts_parameters
from pipelinerl.finetune.policy import LANGUAGE_MODEL
from pipelinerl.inference.arguments import automatic_dtype, named_dtype
from pipelinerl.weights.buffers import NamedTensors, TensorMeta, WeightSource

#: From this compute capability on GPUs have bf16 (Ampere).
_BF16_FROM = (8, 0)
#: Begins the names of the language model's parameters in a policy.
LANGUAGE_PREFIX = f"{LANGUAGE_MODEL}."
_BASE = ".base_layer."
_ADAPTER_PARTS = (".lora_A.", ".lora_B.")


def wire_dtype(config: RunConfig, computed: torch.dtype, device: torch.device, path: str | None = None) -> torch.dtype:
    """Dtype in which weights travel to servers, given that of the trainer's products. No server has to answer.

    It is the servers' own, so that a weight is rounded once; but a trainer with bf16 products sends what it multiplies.
    `vllm_config.vllm_kwargs.dtype` names the servers' dtype. Without the key, servers on a CPU are started in fp32;
    otherwise, and with `auto`, vLLM decides by the checkpoint, and serves no fp32 checkpoint in fp32.

    Args:
        device: of the trainer; servers are taken to have the same kind.
        path: the model; default: the configuration's.
    """
    if computed != torch.float32:
        return computed
    if named := named_dtype(config.vllm_config.vllm_kwargs, "float32" if device.type == "cpu" else None):
        return _dtype(named)
    has_bf16 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= _BF16_FROM
    model = path or config.model_path
    model_config = AutoConfig.from_pretrained(model, trust_remote_code=config.finetune.trust_remote_code)
    return _dtype(automatic_dtype(checkpoint_dtype(model_config), model_config.model_type, has_bf16))


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


def checkpoint_dtype(model_config: Any) -> str:
    """The dtype that the configuration of a model states, else float32, as torch calls it."""
    stated = getattr(model_config, "dtype", None) or getattr(model_config.get_text_config(), "dtype", None)
    return "float32" if stated is None else str(stated).removeprefix("torch.")


class ServedValues:
    """Parameters at values of `dtype`, and what the fp32 master weights have beyond them.

    Args:
        parameters: fp32, sharded or not. The rest of a trained one is kept in another fp32 tensor of its kind; a frozen
            one is rounded for good.
        dtype: of the weights in the servers. What is beyond its range becomes its largest number, the rest is kept:
            it is refused by name when it is sent.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._rests: list[torch.Tensor] = [torch.empty_like(parameter) for parameter in self._trained]
        self._places = {id(parameter): place for place, parameter in enumerate(self._trained)}
        round_for_good([parameter for parameter in parameters if not parameter.requires_grad], dtype)
        self.round()

    @torch.no_grad()
    def round(self) -> None:
        """Take the parameters as master weights and round them. What is taken away is kept exactly."""
        for parameter, rest in zip(self._trained, self._rests, strict=True):
            rest.copy_(parameter)
            parameter.copy_(_narrowed(rest, self.dtype))
            # Exact: the difference of two floats so close has no more digits than the larger of them.
            rest.sub_(parameter.to(rest.device))

    @contextmanager
    def masters(self) -> Iterator[None]:
        """The parameters are the master weights inside, and whatever they are then is rounded at the end."""
        with torch.no_grad():
            for parameter, rest in zip(self._trained, self._rests, strict=True):
                parameter.add_(rest.to(parameter.device))
        try:
            yield
        finally:
            self.round()

    def move_rests(self, device: torch.device) -> None:
        """Keep what the rounded values lack on `device`."""
        self._rests = [rest.to(device) for rest in self._rests]

    def value_of(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """The master weight of `parameter` as a tensor of its own; of a parameter that is not rounded it is itself."""
        place = self._places.get(id(parameter))
        return parameter if place is None else parameter.detach() + self._rests[place].to(parameter.device)

    def values_in(self, dtype: torch.dtype) -> Callable[[str, torch.Tensor], torch.Tensor]:
        """A function from a parameter to what is cast to `dtype`, so that each master weight is rounded once.

        In the servers' dtype the parameter itself is right, and rests that wait in host memory stay there. Not so in
        float16: it hides what is beyond the range.
        """
        if dtype == self.dtype != torch.float16:
            return lambda name, parameter: parameter
        return self.value_of


def round_for_good(parameters: Sequence[torch.nn.Parameter], dtype: torch.dtype) -> None:
    """Round frozen parameters to values of `dtype`; nothing is kept of what is taken away."""
    for parameter in parameters:
        parameter.data.copy_(_narrowed(parameter.data, dtype))


def _narrowed(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.float16:
        # An infinite weight would leave nothing to get the master back from.
        limit = torch.finfo(torch.float16).max
        values = values.clamp(-limit, limit)
    return values.to(dtype)


def parameters_to_round(
    language_model: torch.nn.Module, computed: torch.dtype, served: torch.dtype, *, is_merged: bool
) -> list[torch.nn.Parameter]:
    """The parameters that products in `computed` would use with more digits than `served` has.

    Only matrices of linear layers, and experts that follow autocast, are sure to be rounded by their products. Other
    products of experts may take weights as they are, biases may be added in fp32, and some vectors have two or three
    dimensions.
    Adapters whose servers get the merged matrix (`is_merged`), which nobody holds here, are left alone.
    """
    if torch.finfo(served).bits >= 32:
        return []
    linear = {id(m.weight) for m in language_model.modules() if isinstance(m, torch.nn.Linear | Conv1D)}
    # A head that is tied to the embedding is a linear layer too, but the embedding is looked up in fp32.
    linear -= {id(m.weight) for m in language_model.modules() if isinstance(m, torch.nn.Embedding)}
    spared = linear if computed == served or is_merged else set()
    if computed == served:
        spared |= {id(parameter) for parameter in own_experts_parameters(language_model)}
    return [p for p in language_model.parameters() if p.dtype == torch.float32 and id(p) not in spared]


def is_adapter_part(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return any(part in name for part in _ADAPTER_PARTS)


def checkpoint_name(name: str) -> str | None:
    """Checkpoint name of a policy parameter; None for what the servers never see (the value head, an adapter)."""
    is_sent = name.startswith(LANGUAGE_PREFIX) and not is_adapter_part(name)
    return name.removeprefix(LANGUAGE_PREFIX).replace(_BASE, ".") if is_sent else None


def export_name(name: str) -> str:
    """Name of a policy parameter in an exported model: the checkpoint's; a value head and parts of an adapter as they
    are."""
    return checkpoint_name(name) or name.removeprefix(LANGUAGE_PREFIX)


@dataclass
class _Group:
    """Tensors in memory that become tensors of the checkpoint together.

    `converter` makes them; None: there is one tensor, which only has another name there. `patterns` says by name which
    part of the converter takes a tensor, in the order in which it wants them.
    """

    target: str
    converter: WeightConverter | None
    patterns: dict[str, str | None] = field(default_factory=dict)


class CheckpointForm:
    """Turns the tensors of `model` into those of the checkpoint that it was loaded from (or of its family's, if it was
    not loaded). Tensors of other names pass as they are.

    Args:
        names: of all parameters and saved buffers of the model, without what adapters add.

    Raises:
        ConfigError: the checkpoint is quantized, which cannot be reversed.
    """

    def __init__(self, model: PreTrainedModel, names: Iterable[str]) -> None:
        self._model = model
        self._group_of: dict[str, _Group] = {}
        # In this order and each once: a transform may remember what it has seen (`GroupWeightRename`).
        try:
            reversals = [transform.reverse_transform() for transform in reversed(_conversions(model))]
        except (ValueError, NotImplementedError) as error:
            raise ConfigError(
                "model_path",
                model.config.name_or_path,
                f"a checkpoint whose weights can be written again ({error})",
                "Use the model's unquantized checkpoint.",
            ) from error
        renamings = [transform for transform in reversals if isinstance(transform, WeightRenaming)]
        converters = [transform for transform in reversals if isinstance(transform, WeightConverter)]
        converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        groups: dict[str, _Group] = {}
        for name in sorted(names, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, reverse=True)
            if pattern is None and target == name:
                continue
            converter = None if pattern is None else copy.deepcopy(converter_of[pattern])
            group = groups.setdefault(target, _Group(target, converter))
            group.patterns[name] = pattern
            self._group_of[name] = group

    def renamed(self, name: str) -> str:
        """What the tensor `name` in memory is called in the checkpoint.

        Raises:
            ConfigError: it is a part or a whole of other tensors there.
        """
        group = self._group_of.get(name)
        if group is not None and group.converter is not None:
            raise ConfigError(
                "finetune.lora.sync",
                "adapter",
                f"merged for this model: its checkpoint keeps {name} together with others",
                "Set finetune.lora.sync=merged.",
            )
        return name if group is None else group.target

    def applied_to(self, source: WeightSource) -> WeightSource:
        """The tensors of the checkpoint, made from those of `source`."""
        if not self._group_of:
            return source
        return WeightSource(self.metadata(source.metadata()), lambda: self.buckets(source.gather()), source.announce)

    def metadata(self, metas: Iterable[TensorMeta]) -> list[TensorMeta]:
        """What `buckets` makes of tensors like these."""
        empty = [(meta.name, torch.empty(meta.shape, dtype=meta.dtype, device="meta")) for meta in metas]
        made = [named for bucket in self.buckets([empty]) for named in bucket]
        return [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in made]

    def buckets(self, buckets: Iterable[NamedTensors]) -> Iterator[NamedTensors]:
        """The tensors of the checkpoint, of one pass over those in memory."""
        waiting: dict[str, dict[str, torch.Tensor]] = {}
        for bucket in buckets:
            ready: NamedTensors = []
            for name, tensor in bucket:
                group = self._group_of.get(name)
                if group is None:
                    ready.append((name, tensor))
                    continue
                there = waiting.setdefault(group.target, {})
                there[name] = tensor
                if len(there) == len(group.patterns):
                    ready += self._converted(group, waiting.pop(group.target))
            yield ready
        if waiting:
            raise ValueError(f"weights: the pass ended before all tensors that make up {next(iter(waiting))}")

    def _converted(self, group: _Group, tensors: dict[str, torch.Tensor]) -> NamedTensors:
        if group.converter is None:
            return [(group.target, tensor) for tensor in tensors.values()]
        converter: Any = group.converter  # its types are those of loading
        for name, pattern in group.patterns.items():
            converter.add_tensor(group.target, name, pattern, tensors[name])
        made = converter.convert(group.target, model=self._model, config=self._model.config)
        return [(name, value[0] if isinstance(value, list) else value) for name, value in made.items()]


def _conversions(model: PreTrainedModel) -> list[WeightTransform]:
    """What was done to the checkpoint of `model` when it was loaded, as `save_pretrained` determines it."""
    used: list[WeightTransform] | None = getattr(model, "_weight_conversions", None)
    if used is not None:
        return used
    # Whether a checkpoint has such a prefix is only known once one was loaded.
    return [
        each for each in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(each, PrefixChange)
    ]
