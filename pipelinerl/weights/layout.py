"""Where the tensors of an update lie in its packed buffers. Worked out once, and used for all updates that are alike.

Used by the transfer engines of a server; its buffers are those that `weights.buffers` makes on the trainer's side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pipelinerl.weights.packing import TensorMeta, meta_from_wire, packed_bytes, payload_bytes, plan_chunks, unpack


@dataclass(frozen=True, eq=False)
class BufferLayout:
    """One packed buffer.

    Attributes:
        index: its number in the update, from 0.
        metas: its tensors, in order.
        offsets: where each begins, in bytes.
        payload_bytes: bytes of all tensors.
        num_bytes: size of the buffer, with padding and seal.
    """

    index: int
    metas: tuple[TensorMeta, ...]
    offsets: tuple[int, ...]
    payload_bytes: int
    num_bytes: int

    def unpack(self, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """The tensors in `buffer`, as views where alignment allows it."""
        return unpack(buffer, self.metas)


@dataclass(frozen=True, eq=False)
class UpdateLayout:
    """All buffers of an update. Two updates are alike if they have the same one, which `LayoutCache` sees to."""

    buffers: tuple[BufferLayout, ...]


def plan_layout(metas: Sequence[TensorMeta], chunk_bytes: int) -> UpdateLayout:
    """The buffers in which `metas` travel (the rule of `packing.plan_chunks`)."""
    buffers = []
    for index, chunk in enumerate(plan_chunks(metas, chunk_bytes)):
        offsets, end = [], 0
        for meta in chunk:
            offsets.append(end)
            end += meta.num_bytes
        buffers.append(BufferLayout(index, tuple(chunk), tuple(offsets), payload_bytes(chunk), packed_bytes(chunk)))
    return UpdateLayout(tuple(buffers))


class LayoutCache:
    """The layout of the newest update."""

    def __init__(self) -> None:
        self._key: tuple[list[str], list[str], list[list[int]], int] | None = None
        self._layout = UpdateLayout(())

    def of(
        self, names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]], chunk_bytes: int
    ) -> UpdateLayout:
        """The layout of an update: the same object as last time if nothing changed.

        Args:
            names, dtype_names, shapes: the three lists of the update request.
            chunk_bytes: the size by which both ends split the tensors.

        Raises:
            ValueError: the lists differ in length, or a dtype is unknown.
        """
        key = (list(names), list(dtype_names), [list(shape) for shape in shapes], chunk_bytes)
        if key != self._key:
            self._layout = plan_layout(meta_from_wire(names, dtype_names, shapes), chunk_bytes)
            self._key = key
        return self._layout
