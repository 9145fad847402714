"""Names of the policy's parameters as its checkpoint and the servers know them, and their split into buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from pipelinerl.finetune.lora import is_adapter_part, plain_name, sent_name
from pipelinerl.finetune.policy import LANGUAGE_MODEL, PolicyModel
from pipelinerl.weights.source import TensorMeta

_PREFIX = f"{LANGUAGE_MODEL}."
BUCKET_BYTES = 256 * 2**20

NamedParameter = tuple[str, torch.nn.Parameter]


def checkpoint_name(name: str) -> str | None:
    """Checkpoint name of a policy parameter; None for what the servers never see (the value head, an adapter)."""
    return plain_name(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else None


def export_name(name: str) -> str | None:
    """Name of a policy parameter in an exported model: the checkpoint's; a value head and parts of an adapter as they
    are."""
    own = name.removeprefix(_PREFIX)
    return own if is_adapter_part(own) else plain_name(own)


def adapter_name(name: str) -> str | None:
    """Name of a policy parameter in an update that sends the adapter alone; None for all others."""
    return sent_name(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else None


def adapter_parameters(policy: PolicyModel) -> list[NamedParameter]:
    """What servers get that hold the frozen model themselves: A and B of every layer."""
    named = ((adapter_name(name), parameter) for name, parameter in policy.named_parameters())
    return [(name, parameter) for name, parameter in named if name is not None]


def sent_parameters(policy: PolicyModel, with_value_head: bool = False) -> list[NamedParameter]:
    """Parameters that servers get, under checkpoint names; a tied head appears once, as the embedding."""
    rename = export_name if with_value_head else checkpoint_name
    named = ((rename(name), parameter) for name, parameter in policy.named_parameters())
    return [(name, parameter) for name, parameter in named if name is not None]


def full_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Shape of the whole parameter, also where DeepSpeed keeps only a shard of it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def tensor_metas(parameters: Iterable[NamedParameter], dtype: torch.dtype) -> list[TensorMeta]:
    return [TensorMeta(name, dtype, full_shape(parameter)) for name, parameter in parameters]


def in_buckets(
    parameters: Iterable[NamedParameter], dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[list[NamedParameter]]:
    """Parameters in runs of about `bucket_bytes` (at least one each)."""
    part: list[NamedParameter] = []
    total = 0
    for name, parameter in parameters:
        part.append((name, parameter))
        total += TensorMeta(name, dtype, full_shape(parameter)).num_bytes
        if total >= bucket_bytes:
            yield part
            part, total = [], 0
    if part:
        yield part
