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

from pipelinerl.weights.manifest import DERIVED_SUFFIXES

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


class Form(Protocol):
    """How tensors in memory become those of a checkpoint, which may have other names and be cut otherwise."""

    def metadata(self, metas: Iterable[TensorMeta]) -> list[TensorMeta]:
        """What `buckets` makes of tensors like these."""
        ...

    def buckets(self, buckets: Iterable[Bucket]) -> Iterator[Bucket]:
        """The tensors of a checkpoint, of one pass over all tensors in memory. Reads the pass to its end."""
        ...


class ModuleSource:
    """The weights of a plain `torch.nn.Module` in Hugging Face names, and the buffers that its checkpoint has.

    Args:
        module: a model whose parameter names are those of its checkpoint.
        dtype: dtype of parameters on the wire; None keeps each one's own, as buffers always do.
        rename: maps a name to the checkpoint's; returning None leaves it out (a tied head, an adapter).
        value_of: gives what travels for a parameter of this name (merged weights), one tensor at a time; None: itself.
        form: turns all that into the tensors of a checkpoint; None: they are.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        dtype: torch.dtype | None = None,
        rename: Callable[[str], str | None] | None = None,
        value_of: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
        form: Form | None = None,
    ) -> None:
        self._value_of = value_of
        self._form = form
        self._tensors: list[tuple[TensorMeta, str, torch.Tensor]] = []
        # `named_parameters` reports a shared parameter once, so a tied head does not travel twice.
        for name, tensor in (*module.named_parameters(), *saved_buffers(module)):
            if (wire_name := name if rename is None else rename(name)) is not None:
                wire_dtype = dtype if dtype is not None and isinstance(tensor, torch.nn.Parameter) else tensor.dtype
                self._tensors.append((TensorMeta(wire_name, wire_dtype, tuple(tensor.shape)), name, tensor))

    def metadata(self) -> list[TensorMeta]:
        metas = [meta for meta, _, _ in self._tensors]
        return metas if self._form is None else self._form.metadata(metas)

    def buckets(self) -> Iterator[Bucket]:
        return self._own() if self._form is None else self._form.buckets(self._own())

    def _own(self) -> Iterator[Bucket]:
        for meta, own_name, tensor in self._tensors:
            value = tensor if self._value_of is None else self._value_of(own_name, tensor)
            yield [(meta.name, value.detach().to(meta.dtype))]


def saved_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers of `module` that are part of its checkpoint, such as the bias by which a router balances experts.

    Left out are those that loaders compute although checkpoints may have them.
    """
    for prefix, owner in module.named_modules():
        for name, buffer in owner.named_buffers(prefix, recurse=False):
            is_saved = name.rpartition(".")[2] not in owner._non_persistent_buffers_set
            if is_saved and not name.endswith(DERIVED_SUFFIXES):
                yield name, buffer


class CollectiveSource:
    """A source whose tensors are gathered by all trainer ranks together (ZeRO-3, FSDP2).

    Rank 0 passes it to the publisher and calls `done` afterwards; every other rank calls `follow`, which takes part in
    as many passes as rank 0 makes.

    Args:
        metas: descriptions of all tensors, in the order of `gather`.
        gather: one pass of the collective; yields buckets (empty ones on ranks that only take part).
        announce: broadcasts a flag from rank 0 to all ranks and returns it.
        form: turns what is gathered into the tensors of a checkpoint; None: they are.
    """

    def __init__(
        self,
        metas: list[TensorMeta],
        gather: Callable[[], Iterable[Bucket]],
        announce: Callable[[bool], bool],
        form: Form | None = None,
    ) -> None:
        self._form = form
        self._metas = metas if form is None else form.metadata(metas)
        self._gather = gather
        self._announce = announce

    def metadata(self) -> list[TensorMeta]:
        return self._metas

    def buckets(self) -> Iterator[Bucket]:
        self._announce(True)
        yield from self._gather() if self._form is None else self._form.buckets(self._gather())

    def done(self) -> None:
        """Rank 0: no further pass follows in this round. Call it whatever happened to the update."""
        self._announce(False)

    def follow(self) -> None:
        """Other ranks: take part in every pass of one round."""
        while self._announce(False):
            for _ in self._gather():
                pass
