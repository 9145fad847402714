"""Makes the copies of one packed buffer by few calls.

Called by `inference.planned_load` with the steps that `inference.copy_plan` recorded, and by `inference.proof`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pipelinerl.inference.copy_plan import Constant, Copy, Step, overlap
from pipelinerl.weights.layout import BufferLayout


@dataclass
class _Group:
    """Copies of one pair of dtypes on one device, for one call of `torch._foreach_copy_`."""

    dtype: torch.dtype
    targets: list[torch.Tensor] = field(default_factory=list)
    # Dense sources are cut out of the buffer by one split: sizes of all pieces, and the numbers of those that are used.
    sizes: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    end: int = 0
    strided_targets: list[torch.Tensor] = field(default_factory=list)
    strided: list[tuple[tuple[int, ...], tuple[int, ...], int]] = field(default_factory=list)

    def add(self, copy: Copy, begin: int) -> None:
        """`begin`: the first element of the source in the buffer. In ascending order."""
        if begin < self.end or not copy.target.is_contiguous() or copy.stride != _dense_stride(copy.size):
            self.strided_targets.append(copy.target)
            self.strided.append((copy.size, copy.stride, begin))
            return
        if begin > self.end:
            self.sizes.append(begin - self.end)
        self.used.append(len(self.sizes))
        self.sizes.append(copy.target.numel())
        self.targets.append(copy.target.view(-1))
        self.end = begin + copy.target.numel()

    def make(self, buffer: torch.Tensor) -> None:
        elements = buffer.view(self.dtype)
        if self.targets:
            pieces = elements[: self.end].split_with_sizes(self.sizes)
            torch._foreach_copy_(self.targets, [pieces[number] for number in self.used])
        if self.strided:
            first = elements.storage_offset()
            parts = [elements.as_strided(size, stride, first + begin) for size, stride, begin in self.strided]
            torch._foreach_copy_(self.strided_targets, parts)


class BufferCopies:
    """The steps of one buffer, ready to be made again and again.

    Their order is kept only where two of them write the same bytes; all copies are made one by one there.
    """

    def __init__(self, part: BufferLayout, steps: Sequence[Step]) -> None:
        self.steps = steps
        self._part = part
        self._groups: dict[tuple[torch.dtype, torch.dtype, torch.device], _Group] = {}
        self._one_by_one: list[Step] = []
        if overlap(steps):
            self._one_by_one = list(steps)
            return
        copies = [step for step in steps if isinstance(step, Copy)]
        for copy in sorted(copies, key=lambda copy: (copy.tensor, copy.offset)):
            dtype = part.metas[copy.tensor].dtype
            begin, unaligned = divmod(part.offsets[copy.tensor], dtype.itemsize)
            if unaligned:
                self._one_by_one.append(copy)
                continue
            key = (dtype, copy.target.dtype, copy.target.device)
            self._groups.setdefault(key, _Group(dtype)).add(copy, begin + copy.offset)
        self._one_by_one += [step for step in steps if isinstance(step, Constant)]

    @torch.no_grad()
    def make(self, buffer: torch.Tensor) -> None:
        """Copy from `buffer` (uint8, of the layout that was recorded) into the model."""
        for group in self._groups.values():
            group.make(buffer)
        for step in self._one_by_one:
            if isinstance(step, Constant):
                step.target.fill_(step.value)
            else:
                step.target.copy_(self._source(step, buffer))

    def _source(self, copy: Copy, buffer: torch.Tensor) -> torch.Tensor:
        meta, begin = self._part.metas[copy.tensor], self._part.offsets[copy.tensor]
        tensor = buffer[begin : begin + meta.num_bytes]
        if begin % meta.dtype.itemsize:
            tensor = tensor.clone()
        whole = tensor.view(meta.dtype)
        return whole.as_strided(copy.size, copy.stride, whole.storage_offset() + copy.offset)


def _dense_stride(size: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(size):
        strides.append(step)
        step *= max(1, length)
    return tuple(reversed(strides))
