"""Tensors packed into byte buffers, so that a model of many small tensors needs few broadcasts.

Trainer and server split the same list of tensors by the same rule, so that no header travels with a buffer: tensors
are appended until the buffer exceeds `chunk_bytes`, then it is closed. Layout of a buffer: the tensors' bytes, zero
bytes up to a multiple of 8, and the seal of `weights.seal`, which is not counted in `chunk_bytes`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from pipelinerl.weights.seal import SEAL_BYTES, sealed_bytes, write_seal

DEFAULT_CHUNK_BYTES = 256 * 2**20
#: Tensors of one of these are put together as they are; others as bytes, which takes longer.
_JOINED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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


def payload_bytes(metas: Iterable[TensorMeta]) -> int:
    """Bytes of the tensors of one buffer."""
    return sum(meta.num_bytes for meta in metas)


def packed_bytes(metas: Iterable[TensorMeta]) -> int:
    """Size of the buffer that `pack` makes of these tensors."""
    return sealed_bytes(payload_bytes(metas))


def pack(tensors: Sequence[torch.Tensor], mark: int) -> torch.Tensor:
    """One sealed uint8 buffer with the bytes of `tensors`, in order; strided tensors are made contiguous.

    Args:
        tensors: at least one; all on one device, which is that of the buffer.
        mark: that of the buffer in its pass (`seal.mark_of`).
    """
    parts = [tensor.detach().reshape(-1) for tensor in tensors]
    first = parts[0].dtype
    if first not in _JOINED_DTYPES or any(part.dtype != first for part in parts):
        parts = [part.contiguous().view(torch.uint8) for part in parts]
    payload = sum(part.numel() for part in parts) * parts[0].element_size()
    buffer = torch.empty(sealed_bytes(payload), dtype=torch.uint8, device=parts[0].device)
    torch.cat(parts, out=buffer[:payload].view(parts[0].dtype))
    buffer[payload:-SEAL_BYTES].zero_()
    write_seal(buffer, mark)
    return buffer


def unpack(buffer: torch.Tensor, metas: Sequence[TensorMeta]) -> list[tuple[str, torch.Tensor]]:
    """The inverse of `pack`; the seal is not read. The tensors are views of `buffer` where alignment allows it."""
    if buffer.numel() != packed_bytes(metas):
        expected = f"expected {packed_bytes(metas)} for {len(metas)} tensors"
        raise ValueError(f"packed buffer: got {buffer.numel()} bytes, {expected}")
    tensors: list[tuple[str, torch.Tensor]] = []
    offset = 0
    for meta in metas:
        part = buffer[offset : offset + meta.num_bytes]
        if offset % meta.dtype.itemsize:
            part = part.clone()
        tensors.append((meta.name, part.view(meta.dtype).view(meta.shape)))
        offset += meta.num_bytes
    return tensors
