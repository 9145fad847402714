"""Watches matrix products: how fp32 ones are allowed to be computed, and on request TF32's rounding on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipelinerl.finetune.policy import allowed_products

_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.addmm_.default,
}


@dataclass(frozen=True)
class Product:
    """One product `left @ right`: the shapes of its operands, and whether TF32 was allowed."""

    left: tuple[int, ...]
    right: tuple[int, ...]
    in_tf32: bool

    def has(self, size: int) -> bool:
        return size in self.left or size in self.right

    @property
    def inner(self) -> int:
        return self.left[-1]


class MatrixProducts(TorchDispatchMode):
    """Context manager; `seen` are the products of this thread (on a CPU autograd's are among them).

    Args:
        rounds: round the operands as a GPU does where TF32 is allowed.
    """

    def __init__(self, rounds: bool = False) -> None:
        super().__init__()
        self.seen: list[Product] = []
        self._rounds = rounds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS:
            *rest, left, right = args
            in_tf32 = allowed_products() == "tf32"
            self.seen.append(Product(tuple(left.shape), tuple(right.shape), in_tf32))
            if self._rounds and in_tf32:
                args = (*rest, to_tf32(left), to_tf32(right))
        return func(*args, **(kwargs or {}))


def to_tf32(values: torch.Tensor) -> torch.Tensor:
    """fp32 values rounded to 10 bits of mantissa, ties to even."""
    bits = values.contiguous().view(torch.int32)
    rounded = (bits + 0x0FFF + ((bits >> 13) & 1)) & ~0x1FFF
    return rounded.view(torch.float32)
