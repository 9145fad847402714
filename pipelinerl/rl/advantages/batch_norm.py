"""Normalisation of advantages over a whole optimizer step (REINFORCE++, arXiv 2501.03262). No torch.

    A_t = (A'_t - mean(A')) / (std(A') + 1e-8)

Mean and standard deviation are over trained tokens, as in the paper: every token of the step counts once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipelinerl.rl.advantages.base import are_equal

NORM_EPSILON = 1e-8


def normalize_batch(advantages: Sequence[Sequence[float]], tokens: Sequence[int]) -> list[list[float]]:
    """(A - mean) / std over the tokens of the step.

    Args:
        advantages: of each sample, one value for all its tokens or one for each.
        tokens: trained tokens of each sample.

    Returns:
        Normalised advantages in the shape of `advantages`; all 0 if they are equal up to rounding.

    Raises:
        ValueError: a sample has neither one value nor one for each token.
    """
    weighted: list[tuple[float, int]] = []
    for values, count in zip(advantages, tokens, strict=True):
        if len(values) not in (1, count):
            raise ValueError(f"normalize_batch: got {len(values)} advantages for {count} tokens, expected 1 or as many")
        weight = count if len(values) == 1 else 1
        weighted += [(value, weight) for value in values if weight]
    total = sum(weight for _, weight in weighted)
    if total == 0 or are_equal([value for value, _ in weighted]):
        return [[0.0] * len(values) for values in advantages]
    middle = math.fsum(value * weight for value, weight in weighted) / total
    variance = math.fsum(weight * (value - middle) ** 2 for value, weight in weighted) / total
    scale = math.sqrt(variance) + NORM_EPSILON
    return [[(value - middle) / scale for value in values] for values in advantages]
