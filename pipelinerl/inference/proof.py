"""Proves during one update that the copies of a plan leave the model as vLLM's loaders do.

Made by `inference.planned_load` for an update that is made both ways, buffer by buffer: first copied, then loaded.
Every byte of the model belongs to the last buffer whose copies write it, or to none. If each byte is in the end what
the copies of its buffer had put there, or what it was before if it has none, the copies alone leave the same model.

The work is linear in the bytes of the model, however many buffers there are: each byte is overwritten once and read
for two fingerprints, one after its copies and one at the end. Only the end waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from pipelinerl.inference.copy_plan import ModelMemory, extent, storage_of
from pipelinerl.inference.copying import BufferCopies

#: Every byte of an area before its copies are made: what they leave out shows, also if its value did not change.
_STALE_BYTE = 0xA5
_WORD_BYTES = 8
#: A fingerprint works on a matrix of words with rows of this length.
_ROW_WORDS = 4096
_ROW_BYTES = _ROW_WORDS * _WORD_BYTES

_Extents = list[tuple[int, int]]


class Proof:
    """Of one update. Call `copy` for every buffer, each before it is loaded as usual, and `differences` at the end.

    Args:
        memory: that of the model.
        copies: those of every buffer, by its number; buffers come in this order.

    Raises:
        RuntimeError: the device cannot do it; so do the methods.
    """

    def __init__(self, memory: ModelMemory, copies: Mapping[int, BufferCopies]) -> None:
        self._copies = copies
        self._areas, self._rest = _areas(memory, copies)
        self._copied: dict[int, list[torch.Tensor]] = {}
        self._before = fingerprints(self._rest)

    @torch.no_grad()
    def copy(self, index: int, buffer: torch.Tensor) -> None:
        """Make the copies of buffer `index`, and remember what they left."""
        for area in self._areas[index]:
            area.fill_(_STALE_BYTE)
        self._copies[index].make(buffer)
        self._copied[index] = fingerprints(self._areas[index])

    def differences(self) -> list[str]:
        """Where the copies and the loaders, which came after them, did not do the same. Waits for the device."""
        different = [
            f"buffer {index + 1}"
            for index, areas in sorted(self._areas.items())
            if index not in self._copied or not _are_equal(self._copied[index], fingerprints(areas))
        ]
        if not _are_equal(self._before, fingerprints(self._rest)):
            different.append("what no buffer fills")
        return different


@torch.no_grad()
def fingerprints(areas: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Numbers (int64) that tell the bytes of these areas from others, one vector for each device; waits for none.

    A number is the sum of all words of 8 bytes, each times a factor of its place, modulo 2**64. Factors are odd: any
    change of one word changes it. They are as good as random: so do words that changed places. Word (i, j) of a matrix
    has the factor r[i] + c[j]: the sums of rows and of columns are enough, and nothing as large as the area is made.

    Args:
        areas: uint8, one dimension each, dense. What is short or left over beside whole rows is put together.
    """
    rows: dict[torch.device, list[torch.Tensor]] = {}
    remains: dict[torch.device, list[torch.Tensor]] = {}
    for area in areas:
        head = min(-area.storage_offset() % _WORD_BYTES, area.numel())
        whole = (area.numel() - head) // _ROW_BYTES * _ROW_BYTES
        large, small = rows.setdefault(area.device, []), remains.setdefault(area.device, [])
        if whole:
            large.append(area[head : head + whole].view(torch.int64).view(-1, _ROW_WORDS))
        small += [part for part in (area[:head], area[head + whole :]) if part.numel()]
    vectors = []
    for device, large in rows.items():
        if small := remains[device]:
            missing = -sum(part.numel() for part in small) % _ROW_BYTES
            joined = torch.cat([*small, torch.zeros(missing, dtype=torch.uint8, device=device)])
            large = [*large, joined.view(torch.int64).view(-1, _ROW_WORDS)]
        vectors.append(_weighted_sums(large, device))
    return vectors


def _weighted_sums(matrices: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    most = max((matrix.shape[0] for matrix in matrices), default=0)
    mixed = _mixed(_ROW_WORDS + most, device)
    of_columns, of_rows = 2 * mixed[:_ROW_WORDS] + 1, 2 * mixed[_ROW_WORDS:]
    sums = [
        (matrix.sum(dim=1) * of_rows[: matrix.shape[0]]).sum() + (matrix.sum(dim=0) * of_columns).sum()
        for matrix in matrices
    ]
    return torch.stack(sums) if sums else mixed[:0]


def _mixed(count: int, device: torch.device) -> torch.Tensor:
    """The same `count` numbers each time, without a pattern (multiplications and shifts, as hash functions do)."""
    numbers = torch.arange(1, count + 1, device=device) * 0x1E3779B97F4A7C15
    numbers = (numbers ^ (numbers >> 32)) * 0x3F58476D1CE4E5B9
    return numbers ^ (numbers >> 29)


def _are_equal(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def _areas(
    memory: ModelMemory, copies: Mapping[int, BufferCopies]
) -> tuple[dict[int, list[torch.Tensor]], list[torch.Tensor]]:
    """The bytes that belong to each buffer, and those that belong to none, as dense pieces of the model's memory."""
    whole = {storage: _bytes_behind(tensor) for storage, tensor in memory.tensors.items()}
    taken: dict[int, _Extents] = {}
    areas: dict[int, list[torch.Tensor]] = {}
    for index in sorted(copies, reverse=True):
        written: dict[int, _Extents] = {}
        for step in copies[index].steps:
            written.setdefault(storage_of(step.target), []).append(extent(step.target))
        areas[index] = []
        for storage, extents in written.items():
            later = taken.get(storage, [])
            areas[index] += [whole[storage][begin:end] for begin, end in _without(_merged(extents), later)]
            taken[storage] = _merged([*later, *extents])
    rest = [
        memory_bytes[begin:end]
        for storage, memory_bytes in whole.items()
        for begin, end in _without([(0, memory_bytes.numel())], taken.get(storage, []))
    ]
    return areas, rest


def _bytes_behind(tensor: torch.Tensor) -> torch.Tensor:
    """All of the memory that `tensor` is a view of."""
    no_bytes = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return no_bytes.set_(tensor.untyped_storage())  # type: ignore[call-overload, no-any-return]


def _merged(extents: _Extents) -> _Extents:
    """The same bytes in ascending order, in as few extents as it takes."""
    merged: _Extents = []
    for begin, end in sorted(extents):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _without(extents: _Extents, taken: _Extents) -> _Extents:
    """What of `extents` is not in `taken`; both are as `_merged` makes them."""
    left: _Extents = []
    for begin, end in extents:
        for other_begin, other_end in taken:
            if other_begin >= end:
                break
            if begin < other_begin:
                left.append((begin, other_begin))
            begin = max(begin, other_end)
        if begin < end:
            left.append((begin, end))
    return left
