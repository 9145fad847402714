"""Attention over packed samples in one kernel: PyTorch's flash attention for rows of several sequences.

Registered with transformers by `attention.register_own_attention`; for half precision on GPUs with a PyTorch that has
`torch.nn.attention.varlen` (2.11 or later). Where the segmented attention copies samples into blocks of equal length,
this one reads the row as it is: one kernel a layer instead of about ten, which is what a small model waits for.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

VARLEN_ATTENTION = "pipelinerl_varlen"
_MODULE = "torch.nn.attention.varlen"


@dataclass(frozen=True)
class VarlenLayout:
    """Where the samples of one packed row of T tokens begin.

    `boundaries` int32 `[samples + 1]`: 0, then the end of every sample; `longest` is the longest sample in tokens.
    """

    boundaries: torch.Tensor
    longest: int

    def to(self, device: torch.device) -> VarlenLayout:
        return VarlenLayout(self.boundaries.to(device, non_blocking=True), self.longest)


def varlen_layout(lengths: Sequence[int]) -> VarlenLayout:
    """Layout of a row that holds samples of these `lengths` one after the other."""
    return VarlenLayout(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), max(lengths))


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: VarlenLayout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    kernel: Callable[..., torch.Tensor] | None = None,
) -> torch.Tensor:
    """Causal attention inside each sample of a packed row.

    Args:
        query: `[1, heads, T, head size]`; `key` and `value` may have fewer heads. `value` has the dtype of the result
            (bf16 or fp16); the others may be wider, as rotary embeddings leave them under autocast.
        sliding_window: tokens that a position sees, itself included; None: all before it.
        kernel: `varlen_attn` or what stands for it in a test.

    Returns:
        `[1, T, heads, head size]`.
    """
    kernel = kernel or _kernel()
    q, k, v = (states[0].transpose(0, 1).to(value.dtype) for states in (query, key, value))
    options: dict[str, object] = {}
    if q.shape[1] != k.shape[1]:
        if _has_grouped_heads(kernel):
            options["enable_gqa"] = True
        else:
            k, v = (states.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for states in (k, v))
    # (left, right): tokens before and after a position that it sees; -1 is all of them.
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    boundaries, longest = layout.boundaries, layout.longest
    return kernel(q, k, v, boundaries, boundaries, longest, longest, scale=scaling, window_size=window, **options)[None]


def can_use_varlen(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this PyTorch has the kernel for products of `dtype` on `device`."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    # The first releases of the module had neither windows nor a scale.
    return importlib.util.find_spec(_MODULE) is not None and {"scale", "window_size"} <= _parameters(_kernel())


def _kernel() -> Callable[..., torch.Tensor]:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn  # type: ignore[return-value]


def _has_grouped_heads(kernel: Callable[..., torch.Tensor]) -> bool:
    return "enable_gqa" in _parameters(kernel)


@cache
def _parameters(kernel: Callable[..., torch.Tensor]) -> frozenset[str]:
    return frozenset(inspect.signature(kernel).parameters)
