"""Names and form of a model's weights in its checkpoint, which is what servers and other programs load.

transformers keeps some models otherwise than their checkpoints do: all experts of a layer are one tensor, or a family
has other names. It converts while it loads, and back in `save_pretrained`, which needs the whole model at once. Here
the same conversions are taken back group by group, as soon as the tensors of a group are there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from pipelinerl.errors import ConfigError
from pipelinerl.finetune.policy import LANGUAGE_MODEL
from pipelinerl.weights.buffers import NamedTensors, TensorMeta

#: Begins the names of the language model's parameters in a policy.
LANGUAGE_PREFIX = f"{LANGUAGE_MODEL}."
_BASE = ".base_layer."
_ADAPTER_PARTS = (".lora_A.", ".lora_B.")


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
        ConfigError: the checkpoint is quantized, which cannot be taken back.
    """

    def __init__(self, model: PreTrainedModel, names: Iterable[str]) -> None:
        self._model = model
        self._group_of: dict[str, _Group] = {}
        # In this order and each once: a transform may remember what it has seen (`GroupWeightRename`).
        try:
            taken_back = [transform.reverse_transform() for transform in reversed(_conversions(model))]
        except (ValueError, NotImplementedError) as error:
            raise ConfigError(
                "model_path",
                model.config.name_or_path,
                f"a checkpoint whose weights can be written again ({error})",
                "Use the model's unquantized checkpoint.",
            ) from error
        renamings = [transform for transform in taken_back if isinstance(transform, WeightRenaming)]
        converters = [transform for transform in taken_back if isinstance(transform, WeightConverter)]
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
