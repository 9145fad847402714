"""Where the weights of an update come from.

A source declares names, dtypes and shapes without gathering anything, and yields tensors bucket by bucket, so that
a sharded model never exists as a second full copy. A pass may be repeated: a server that failed gets everything again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

Bucket = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class TensorMeta:
    """Name, dtype and shape of one tensor, in the names of the Hugging Face checkpoint."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


class WeightSource(Protocol):
    """The weights of one version."""

    def metadata(self) -> list[TensorMeta]:
        """Every tensor of an update, in the order of `buckets`, without gathering."""
        ...

    def buckets(self) -> Iterator[Bucket]:
        """One new pass over the tensors. The publisher always reads a pass to its end."""
        ...


class ModuleSource:
    """The weights of a plain `torch.nn.Module` in Hugging Face names.

    Args:
        module: a model whose parameter names are those of its checkpoint.
        dtype: dtype on the wire; None keeps each parameter's own.
        rename: maps a parameter name to the checkpoint's; returning None leaves it out (a tied head, an adapter).
        value_of: gives what travels for a parameter of this name (merged weights), one tensor at a time; None: itself.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        dtype: torch.dtype | None = None,
        rename: Callable[[str], str | None] | None = None,
        value_of: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._dtype = dtype
        self._value_of = value_of
        self._parameters: list[tuple[str, str, torch.Tensor]] = []
        # `named_parameters` reports a shared parameter once, so a tied head does not travel twice.
        for name, parameter in module.named_parameters():
            if (wire_name := name if rename is None else rename(name)) is not None:
                self._parameters.append((wire_name, name, parameter))

    def metadata(self) -> list[TensorMeta]:
        return [
            TensorMeta(name, self._dtype or parameter.dtype, tuple(parameter.shape))
            for name, _, parameter in self._parameters
        ]

    def buckets(self) -> Iterator[Bucket]:
        for name, own_name, parameter in self._parameters:
            value = parameter if self._value_of is None else self._value_of(own_name, parameter)
            yield [(name, value.detach().to(self._dtype or parameter.dtype))]


class CollectiveSource:
    """A source whose tensors are gathered by all trainer ranks together (ZeRO-3, FSDP2).

    Rank 0 passes it to the publisher and calls `done` afterwards; every other rank calls `follow`, which takes part in
    as many passes as rank 0 makes.

    Args:
        metas: descriptions of all tensors, in the order of `gather`.
        gather: one pass of the collective; yields buckets (empty ones on ranks that only take part).
        announce: broadcasts a flag from rank 0 to all ranks and returns it.
    """

    def __init__(
        self,
        metas: list[TensorMeta],
        gather: Callable[[], Iterable[Bucket]],
        announce: Callable[[bool], bool],
    ) -> None:
        self._metas = metas
        self._gather = gather
        self._announce = announce

    def metadata(self) -> list[TensorMeta]:
        return self._metas

    def buckets(self) -> Iterator[Bucket]:
        self._announce(True)
        yield from self._gather()

    def done(self) -> None:
        """Rank 0: no further pass follows in this round. Call it whatever happened to the update."""
        self._announce(False)

    def follow(self) -> None:
        """Other ranks: take part in every pass of one round."""
        while self._announce(False):
            for _ in self._gather():
                pass
