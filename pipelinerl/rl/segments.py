"""Sums over the samples of a micro-batch. Samples are never split, so these are sums over whole sequences."""

from __future__ import annotations

import torch


def segment_sum(values: torch.Tensor, mask: torch.Tensor, segment_ids: torch.Tensor, num_segments: int) -> torch.Tensor:
    """Sum of `values` [R, T] where `mask`, by sample: [num_segments]."""
    out = values.new_zeros(max(num_segments, 1))
    kept = torch.where(mask, values, torch.zeros_like(values))
    return out.index_add(0, segment_ids.clamp(min=0).reshape(-1), kept.reshape(-1))


def segment_mean(
    values: torch.Tensor, mask: torch.Tensor, segment_ids: torch.Tensor, num_segments: int
) -> torch.Tensor:
    """Mean of `values` over the trained tokens of every sample: [num_segments]; 0 for a sample without any."""
    counts = segment_sum(mask.to(values.dtype), mask, segment_ids, num_segments)
    return segment_sum(values, mask, segment_ids, num_segments) / counts.clamp(min=1)


def to_tokens(per_segment: torch.Tensor, segment_ids: torch.Tensor) -> torch.Tensor:
    """Give every position the value of its sample: [R, T]. Padding gets that of sample 0; it is masked anyway."""
    return per_segment[segment_ids.clamp(min=0)]
