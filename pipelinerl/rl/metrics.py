"""Metrics of the loss that can be added up over micro-batches and ranks without a host synchronisation.

Every value is a 0-d tensor that carries how it is combined. Means are stated as sums of `value / step total`, so the
only reductions are sum, max and min and the result never depends on packing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

Reduction = Literal["sum", "max", "min"]


@dataclass(frozen=True)
class TensorMetric:
    """`value` (0-d, detached) of one micro-batch; `reduction` says how micro-batches and ranks combine."""

    value: torch.Tensor
    reduction: Reduction = "sum"


def combine(parts: Iterable[dict[str, TensorMetric]]) -> dict[str, TensorMetric]:
    """Combine the metrics of several micro-batches of one rank."""
    total: dict[str, TensorMetric] = {}
    for part in parts:
        for name, metric in part.items():
            total[name] = _join(total[name], metric) if name in total else metric
    return total


def _join(left: TensorMetric, right: TensorMetric) -> TensorMetric:
    if left.reduction != right.reduction:
        raise ValueError(f"one metric has two reductions: {left.reduction} and {right.reduction}")
    if left.reduction == "sum":
        return TensorMetric(left.value + right.value, "sum")
    bound = torch.maximum if left.reduction == "max" else torch.minimum
    return TensorMetric(bound(left.value, right.value), left.reduction)
