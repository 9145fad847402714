"""How fp32 matrix products are computed on a GPU: exactly, or with inputs rounded to TF32 (10 bits of mantissa).

The policy allows TF32 for its body, the chunked head forbids it for its logits. The setting is global to the process,
because autograd threads must see it; on a CPU it changes nothing.

It uses `fp32_precision`, which neither warns nor affects CPU products in torch 2.11 and 2.13. While that is TF32,
`torch.get_float32_matmul_precision` raises, so nothing may be compiled inside.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

FP32Products = Literal["ieee", "tf32"]


@contextmanager
def fp32_products(kind: FP32Products) -> Iterator[None]:
    """Inside, fp32 products on GPUs are exact (`ieee`) or in TF32; afterwards the previous setting is restored."""
    before = allowed_products()
    _allow(kind)
    try:
        yield
    finally:
        _allow(before)


def keep_exact(module: torch.nn.Module) -> None:
    """Always run the forward pass of `module` with exact fp32 products.

    For positions and angles: TF32 represents integers exactly only up to 2048.
    """
    before: list[str] = []

    def enter(*_: object) -> None:
        before.append(allowed_products())
        _allow("ieee")

    def leave(*_: object) -> None:
        _allow(before.pop())

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


def allowed_products() -> str:
    """How fp32 products on GPUs are computed now: `tf32`, or `ieee` or `none`, which are both exact."""
    return str(torch.backends.cuda.matmul.fp32_precision)


def _allow(kind: str) -> None:
    torch.backends.cuda.matmul.fp32_precision = kind
