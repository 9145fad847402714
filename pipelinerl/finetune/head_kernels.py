"""Triton kernels of the output head on GPUs: what `policy.py` needs of a chunk of logits, in one pass over it.

A chunk is `tokens x vocabulary` floats, and PyTorch's own operations read and write all of it once each, which takes
longer than the products around them. `policy.py` has the formulas, and the same in PyTorch for everything else.
"""

from __future__ import annotations

import subprocess

import torch
import triton
import triton.language as tl

#: Logits of a row that a program holds at once, and the threads that share them.
_BLOCK, _WARPS = 4096, 8
#: What `try_out` raises where kernels cannot be compiled or started: Triton's own, and what a missing or broken C
#: compiler makes of it.
FAILURES = (RuntimeError, OSError, subprocess.SubprocessError, triton.TritonError)


@triton.jit
def _statistics_kernel(  # type: ignore[no-untyped-def]
    logits,
    stride,
    targets,
    temperature,
    columns,
    log_norms,
    logprobs,
    entropies,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    place = tl.arange(0, BLOCK)
    # Of the columns of each lane: the largest z, the sum of exp(z - top), and that of exp(z - top) * (z - top). Not
    # -inf at first: the difference of two would be NaN.
    top = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        z = tl.load(logits + start + place, mask=start + place < columns, other=-float("inf")) / temperature
        higher = tl.maximum(top, z)
        shrunk, grown = tl.exp(top - higher), tl.exp(z - higher)
        if WITH_ENTROPY:
            # 0 * inf would be NaN.
            own = tl.where(z > -float("inf"), grown * (z - higher), 0.0)
            moment = shrunk * (moment + total * (top - higher)) + own
        total = total * shrunk + grown
        top = higher
    highest = tl.max(top, 0)
    shrunk = tl.exp(top - highest)
    sum_ = tl.sum(total * shrunk, 0)
    log_sum = tl.log(sum_)
    tl.store(log_norms + row, highest + log_sum)
    target = tl.load(logits + tl.load(targets + row)) / temperature
    tl.store(logprobs + row, (target - highest) - log_sum)
    if WITH_ENTROPY:
        tl.store(entropies + row, log_sum - tl.sum(shrunk * (moment + total * (top - highest)), 0) / sum_)


@triton.jit
def _slope_kernel(  # type: ignore[no-untyped-def]
    logits,
    stride,
    targets,
    temperature,
    columns,
    log_norms,
    entropies,
    grad_logprobs,
    grad_entropies,
    slopes,
    slopes_stride,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = place < columns
    z = tl.load(logits + row * stride + place, mask=is_inside, other=0.0) / temperature
    log_p = z - tl.load(log_norms + row)
    grad = tl.load(grad_logprobs + row)
    steep = grad
    if WITH_ENTROPY:
        steep += tl.load(grad_entropies + row) * (log_p + tl.load(entropies + row))
    slope = tl.where(place == tl.load(targets + row), grad, 0.0) - steep * tl.exp(log_p)
    tl.store(slopes + row * slopes_stride + place, slope.to(slopes.dtype.element_ty), mask=is_inside)


def statistics(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of every row of `logits` `[N, V]` fp32: log-normalizer, log-prob of its target, entropy (else 0), `[N]` fp32.

    Args:
        targets: `[N]` int64, all of them columns.
    """
    count, columns = logits.shape
    log_norms, logprobs, entropies = torch.zeros(3, count, device=logits.device).unbind()
    _statistics_kernel[(count,)](
        *(logits, logits.stride(0), targets, temperature, columns, log_norms, logprobs, entropies),
        WITH_ENTROPY=with_entropy,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    return log_norms, logprobs, entropies


def slope(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    log_norms: torch.Tensor,
    entropies: torch.Tensor,
    grad_logprobs: torch.Tensor,
    grad_entropies: torch.Tensor,
    with_entropy: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Gradient with respect to z = logits / temperature, `[N, V]`, rounded once, to `dtype`; fp32 takes the place of
    `logits`. The vectors are `[N]` fp32."""
    count, columns = logits.shape
    slopes = logits if dtype == logits.dtype else torch.empty_like(logits, dtype=dtype)
    _slope_kernel[(count, triton.cdiv(columns, _BLOCK))](
        *(logits, logits.stride(0), targets, temperature, columns, log_norms, entropies),
        *(grad_logprobs, grad_entropies, slopes, slopes.stride(0)),
        WITH_ENTROPY=with_entropy,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    return slopes


def try_out(device: torch.device) -> None:
    """Compile and start every kernel on `device`; raises one of `FAILURES` if one does not run there."""
    logits, targets = torch.zeros(1, 2, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    for with_entropy in (False, True):
        log_norms, _, entropies = statistics(logits, targets, 1.0, with_entropy)
        for dtype in (torch.bfloat16, torch.float32):
            # Zero gradients: slopes in fp32 take the place of the logits.
            zeros = torch.zeros_like(log_norms)
            slope(logits, targets, 1.0, log_norms, entropies, zeros, zeros, with_entropy, dtype)
