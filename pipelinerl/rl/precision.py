"""How fp32 matrix products are computed on a GPU: exactly, or with inputs rounded to TF32 (10 bits of mantissa).

The policy allows TF32 around its body, the chunked head forbids it for its logits. The setting belongs to the whole
process, because the threads of autograd have to see it; on a CPU it changes nothing. Waits for nothing.

It goes through `fp32_precision`, which neither warns nor touches products on a CPU, in torch 2.11 and 2.13 alike.
While it says TF32, `torch.get_float32_matmul_precision` raises an error, so nothing is compiled meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

FP32Products = Literal["ieee", "tf32"]


@contextmanager
def fp32_products(kind: FP32Products) -> Iterator[None]:
    """Within it fp32 products on GPUs are exact (`ieee`) or in TF32; behind it they are as before."""
    before = allowed_products()
    _allow(kind)
    try:
        yield
    finally:
        _allow(before)


def keep_exact(module: torch.nn.Module) -> None:
    """Compute the forward pass of `module` with exact fp32 products wherever it is called, for its whole life.

    For positions and angles: TF32 holds whole numbers up to 2048 only.
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
    """What fp32 products on GPUs are now: `tf32`, or `ieee` or `none`, which are both exact."""
    return str(torch.backends.cuda.matmul.fp32_precision)


def _allow(kind: str) -> None:
    torch.backends.cuda.matmul.fp32_precision = kind
