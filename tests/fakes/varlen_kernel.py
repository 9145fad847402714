"""What `torch.nn.attention.varlen.varlen_attn` computes, sample by sample in plain PyTorch; tests/gpu compares them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def plain_varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`[queries, heads, head size]`; a query sees `window_size` tokens before it and after it (-1: all of its sample).

    Queries of a sample are those of its last tokens.
    """
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert max_q == int(cu_seq_q.diff().max()) and max_k == int(cu_seq_k.diff().max())
    assert int(cu_seq_q.diff().min()) >= 1 and bool((cu_seq_q.diff() <= cu_seq_k.diff()).all())
    assert query.dtype == key.dtype == value.dtype
    if query.shape[1] != key.shape[1]:
        assert enable_gqa, "other heads than the query's need enable_gqa where there is this option"
        key, value = (states.repeat_interleave(query.shape[1] // key.shape[1], 1) for states in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    before, after = (float("inf") if size < 0 else size for size in window_size)
    parts = []
    for sample in range(len(cu_seq_q) - 1):
        queries, keys = (slice(*cu_seq[sample : sample + 2].tolist()) for cu_seq in (cu_seq_q, cu_seq_k))
        q, k, v = (states.transpose(0, 1).float() for states in (query[queries], key[keys], value[keys]))
        position = torch.arange(keys.stop - keys.start, device=query.device)
        distance = position[-q.shape[1] :, None] - position[None, :]
        scores = (q @ k.transpose(1, 2) * scale).masked_fill((distance > before) | (distance < -after), float("-inf"))
        parts.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(parts).to(value.dtype)


def plain_without_grouped_heads(
    *inputs: Any, scale: float | None = None, window_size: tuple[int, int] = (-1, -1)
) -> torch.Tensor:
    """The same with the options of the releases that take fewer key heads without being told (torch 2.11)."""
    return plain_varlen_attn(*inputs, scale=scale, window_size=window_size, enable_gqa=True)


def traceable_varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, 0),
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The same without a window, in operations that do not look at values, so that it can be compiled."""
    places = [torch.arange(states.shape[0]) for states in (query, key)]
    samples = [
        (place[:, None] >= cu_seq[None, :]).sum(1) for place, cu_seq in zip(places, (cu_seq_q, cu_seq_k), strict=True)
    ]
    # Counted from the end of the sample.
    left = [cu_seq[sample] - place for place, sample, cu_seq in zip(places, samples, (cu_seq_q, cu_seq_k), strict=True)]
    mask = (samples[0][:, None] == samples[1][None, :]) & (left[0][:, None] <= left[1][None, :])
    states = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    return F.scaled_dot_product_attention(*states, mask, scale=scale, enable_gqa=enable_gqa)[0].transpose(0, 1)
