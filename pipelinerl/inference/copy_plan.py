"""What vLLM's weight loaders do with a packed buffer, as a list of copies that can be made again without them.

A loader that only takes views of the received tensors and copies them into the model does the same at every update:
which bytes go where depends on names, dtypes and shapes alone. `CopyRecorder` watches one load and refuses everything
else; the copies of a buffer are then made by few calls (`inference.copying`). Used by `inference.planned_load`.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from pipelinerl.weights.layout import BufferLayout

_WRITES = (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


class PlanRefusedError(Exception):
    """The load cannot be made again from a list of copies; the message says why."""


@dataclass(frozen=True, eq=False)
class Copy:
    """A part of a received tensor goes into a part of the model.

    Attributes:
        target: view of the model's memory, which it keeps alive.
        tensor: number of the received tensor in its buffer.
        size, stride, offset: the part of it, in elements from its beginning; `size` is that of `target`.
    """

    target: torch.Tensor
    tensor: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, eq=False)
class Constant:
    """A part of the model that gets the same value at every load, such as padding."""

    target: torch.Tensor
    value: float | int | bool


Step = Copy | Constant


class ModelMemory:
    """Where the parameters and buffers of a model lie, to tell later whether they still lie there.

    It keeps their memory alive: an address that is the same is then the same memory.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        #: Every parameter with its name; one that two modules share comes twice.
        self.parameters: list[tuple[str, torch.Tensor]] = []
        #: By address of the memory: a tensor in it.
        self.tensors: dict[int, torch.Tensor] = {}
        modules = dict(model.named_modules())
        # Kept, as the tensors are, so that no other object gets the identity of one.
        self._modules = list(modules.values())
        self._children = [module._modules for module in self._modules]
        self._tables = [table for module in self._modules for table in (module._parameters, module._buffers)]
        for prefix, module in modules.items():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self.parameters.append((f"{prefix}.{name}" if prefix else name, parameter.detach()))
        self._owners = [tensor for table in self._tables for tensor in table.values() if tensor is not None]
        for tensor in self._owners:
            if tensor.device.type != "meta":
                self.tensors.setdefault(storage_of(tensor), tensor.detach())
        self._shapes = [(tensor, tensor.shape, tensor.stride()) for tensor in self._owners]
        self._before = self._present()

    def is_unmoved(self) -> bool:
        """Whether the model has the same modules and tensors, and each lies where it lay, in the same shape."""
        # vLLM's parameters are of a class of their own, which makes every look at them four times as slow.
        with torch._C.DisableTorchFunctionSubclass():
            return self._present() == self._before and all(
                tensor.shape == shape and tensor.stride() == stride for tensor, shape, stride in self._shapes
            )

    def _present(self) -> list[int]:
        """Who the modules and tensors are, and where their memory is. Numbers do not wake the garbage collector."""
        children = [id(module) for table in self._children for module in table.values()]
        tensors = [id(tensor) for table in self._tables for tensor in table.values()]
        return children + tensors + [tensor.data_ptr() for tensor in self._owners]


class CopyRecorder(TorchDispatchMode):
    """Watches one load: what is done with the tensors of one buffer while it is active.

    Args:
        memory: that of the model.
        part: the buffer's layout.
        tensors: those that the loader gets, in order; kept, so that no address of theirs is used twice meanwhile.
    """

    def __init__(self, memory: ModelMemory, part: BufferLayout, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.steps: list[Step] = []
        #: Why no plan can be made; None while all is well.
        self.refusal: str | None = None
        self._memory = memory
        self._part = part
        self._tensors = tensors
        # By storage: where each tensor begins, in bytes, and its number. A buffer's tensors come in ascending order.
        self._sources: dict[int, list[tuple[int, int]]] = {}
        for number, tensor in enumerate(tensors):
            if tensor.numel():
                self._sources.setdefault(storage_of(tensor), []).append((_begin(tensor), number))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.refusal is None:
            try:
                self._note(func, args)
            except PlanRefusedError as refused:
                self.refusal = str(refused)
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, args: tuple[Any, ...]) -> None:
        if func in _WRITES:
            target = self._target(func, args[0])
            if target.numel() == 0:
                return
            if func is torch.ops.aten.copy_.default:
                self.steps.append(self._copy(target, args[1]))
            else:
                self.steps.append(Constant(target, args[1] if len(args) > 1 else 0))
        elif not func.is_view:
            raise PlanRefusedError(f"it computes something ({func})")

    def _target(self, func: Any, tensor: torch.Tensor) -> torch.Tensor:
        if _is_special(tensor) or storage_of(tensor) not in self._memory.tensors:
            raise PlanRefusedError(f"it writes something else than the model's parameters and buffers ({func})")
        view = tensor.detach()
        if flat(view) is None:
            raise PlanRefusedError(f"it writes a part of a parameter with gaps (size {list(view.shape)})")
        return view

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> Copy:
        known = None if _is_special(source) else self._sources.get(storage_of(source))
        if known is None:
            raise PlanRefusedError(f"it copies what was not received into a parameter of size {list(target.shape)}")
        if source.shape != target.shape:
            source = source.expand(target.shape)
        number = known[max(0, bisect.bisect_right(known, (_begin(source), len(self._tensors))) - 1)][1]
        meta, tensor = self._part.metas[number], self._tensors[number]
        offset = int(source.storage_offset() - tensor.storage_offset())
        last = offset + sum((size - 1) * stride for size, stride in zip(source.shape, source.stride(), strict=True))
        if source.dtype != meta.dtype or offset < 0 or last >= tensor.numel():
            raise PlanRefusedError(f"it reads {meta.name} in another way than as a part of it")
        return Copy(target, number, tuple(source.shape), source.stride(), offset)


def storage_of(tensor: torch.Tensor) -> int:
    """Address of the memory that `tensor` is a view of; unique among those that are alive."""
    return tensor.untyped_storage().data_ptr()


def flat(tensor: torch.Tensor) -> torch.Tensor | None:
    """All of a dense `tensor` as one dimension, in the order of its memory; None if it has gaps or overlaps itself."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    order = sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), tensor.size(dim)), reverse=True)
    permuted = tensor.permute(order)
    return permuted.view(-1) if permuted.is_contiguous() else None


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte of `tensor` in its storage, and the one after its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return _begin(tensor), _begin(tensor) + (last + 1) * tensor.element_size()


def uncovered_parameters(memory: ModelMemory, steps: Sequence[Step]) -> list[str]:
    """Names of the parameters of which some element is written by no step."""
    written: dict[int, list[tuple[int, int]]] = {}
    for step in steps:
        written.setdefault(storage_of(step.target), []).append(extent(step.target))
    for extents in written.values():
        extents.sort()
    return [
        name
        for name, tensor in memory.parameters
        if tensor.numel() and not _covers(written.get(storage_of(tensor), []), *extent(tensor))
    ]


def overlap(steps: Sequence[Step]) -> bool:
    """Whether two of the steps write the same bytes, so that their order matters."""
    ends: dict[int, int] = {}
    for storage, (begin, end) in sorted((storage_of(step.target), extent(step.target)) for step in steps):
        if begin < ends.get(storage, 0):
            return True
        ends[storage] = end
    return False


def _covers(sorted_extents: Sequence[tuple[int, int]], begin: int, end: int) -> bool:
    for other_begin, other_end in sorted_extents:
        if other_begin > begin:
            break
        begin = max(begin, other_end)
    return begin >= end


def _begin(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


def _is_special(tensor: torch.Tensor) -> bool:
    """Whether its values are not simply what lies in its memory."""
    return (
        is_traceable_wrapper_subclass(tensor)
        or tensor.layout != torch.strided
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
    )
