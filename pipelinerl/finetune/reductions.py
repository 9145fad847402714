"""Metrics of a step combined over the ranks by their declared reduction. Called by every rank at the same time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from pipelinerl.finetune.ranks import Ranks
from pipelinerl.rl.diagnostics import StepDiagnostics
from pipelinerl.rl.metrics import TensorMetric


def reduce_metrics(metrics: Mapping[str, TensorMetric], ranks: Ranks) -> dict[str, float]:
    """Final values; all ranks hold the same names, because even a sentinel goes through the loss."""
    values: dict[str, float] = {}
    for reduction, operation in (("sum", ranks.sum), ("max", ranks.max), ("min", ranks.min)):
        names = sorted(name for name, metric in metrics.items() if metric.reduction == reduction)
        reduced = operation([float(metrics[name].value) for name in names])
        values.update(zip(names, reduced, strict=True))
    return values


def reduce_diagnostics(diagnostics: StepDiagnostics, ranks: Ranks) -> dict[str, float]:
    """The step's diagnostics over all ranks (empty if nothing was trained)."""
    if ranks.world_size > 1:
        diagnostics = dataclasses.replace(
            diagnostics,
            sums=torch.tensor(ranks.sum(diagnostics.sums.tolist()), dtype=torch.float64),
            maxima=torch.tensor(ranks.max(diagnostics.maxima.tolist()), dtype=torch.float64),
        )
    return diagnostics.values()
