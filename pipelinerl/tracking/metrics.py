"""A metric carries how it is combined, so that no caller has to know.

Called by the roles before they record. Pure: waits for nothing. (The trainer's loss has tensor metrics of its own;
they arrive here as plain numbers.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Reduction = Literal["mean", "sum", "max", "min", "last"]


@dataclass(frozen=True)
class Metric:
    """One number and its reduction over micro-batches, ranks or time.

    Args:
        value: the number.
        reduction: `mean` weighs by `weight`; `last` keeps the newest.
        weight: how much the value counts in a mean, for instance its number of tokens; >= 0.
    """

    value: float
    reduction: Reduction = "mean"
    weight: float = 1.0

    def joined(self, other: Metric) -> Metric:
        """This metric and a later one as one.

        Raises:
            ValueError: the two have different reductions.
        """
        if self.reduction != other.reduction:
            raise ValueError(f"one metric has two reductions: {self.reduction} and {other.reduction}")
        weight = self.weight + other.weight
        match self.reduction:
            case "mean":
                total = self.value * self.weight + other.value * other.weight
                value = total / weight if weight > 0 else 0.0
            case "sum":
                value = self.value + other.value
            case "max":
                value = max(self.value, other.value)
            case "min":
                value = min(self.value, other.value)
            case "last":
                value = other.value
        return Metric(value, self.reduction, weight)


def reduce_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Combine the metrics of several parts, in order. A name that a part lacks is combined over the others.

    Raises:
        ValueError: a name has different reductions in two parts; the message has the name.
    """
    combined: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            try:
                combined[name] = combined[name].joined(metric) if name in combined else metric
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
    return combined


def plain_values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The numbers alone."""
    return {name: metric.value for name, metric in metrics.items()}
