"""Tensors packed into byte buffers, so that a model of many small tensors needs few broadcasts.

Trainer and server split the same list of tensors by the same rule, so that no header travels with a buffer: tensors
are appended until the buffer exceeds `chunk_bytes`, then it is closed. vLLM's packed NCCL engine uses the same rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

DEFAULT_CHUNK_BYTES = 256 * 2**20


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


def meta_from_wire(
    names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]]
) -> list[TensorMeta]:
    """Tensor descriptions from the three lists of an update request.

    Raises:
        ValueError: the lists differ in length, or a dtype is unknown.
    """
    if not len(names) == len(dtype_names) == len(shapes):
        numbers = f"{len(names)} names, {len(dtype_names)} dtypes and {len(shapes)} shapes"
        raise ValueError(f"update: got {numbers}, expected equal numbers")
    metas = []
    for name, dtype_name, shape in zip(names, dtype_names, shapes, strict=True):
        dtype = getattr(torch, dtype_name, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"update: {name}: got dtype {dtype_name!r}, expected the name of a torch dtype")
        metas.append(TensorMeta(name, dtype, tuple(int(size) for size in shape)))
    return metas


def plan_chunks(metas: Iterable[TensorMeta], chunk_bytes: int) -> Iterator[list[TensorMeta]]:
    """Split `metas` into the buffers that they travel in, in order."""
    chunk: list[TensorMeta] = []
    total = 0
    for meta in metas:
        chunk.append(meta)
        total += meta.num_bytes
        if total > chunk_bytes:
            yield chunk
            chunk, total = [], 0
    if chunk:
        yield chunk


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One uint8 buffer with the bytes of `tensors`, in order; strided tensors are made contiguous."""
    return torch.cat([tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])


def unpack(buffer: torch.Tensor, metas: Sequence[TensorMeta]) -> list[tuple[str, torch.Tensor]]:
    """The inverse of `pack`. The tensors are views of `buffer` where alignment allows it."""
    tensors: list[tuple[str, torch.Tensor]] = []
    offset = 0
    for meta in metas:
        part = buffer[offset : offset + meta.num_bytes]
        if offset % meta.dtype.itemsize:
            part = part.clone()
        tensors.append((meta.name, part.view(meta.dtype).view(meta.shape)))
        offset += meta.num_bytes
    if offset != buffer.numel():
        raise ValueError(f"packed buffer: got {buffer.numel()} bytes, expected {offset} for {len(metas)} tensors")
    return tensors
