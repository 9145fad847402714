"""Normalisation of advantages over a whole optimizer step (REINFORCE++, arXiv 2501.03262). No torch.

Means and standard deviation are over trained tokens, as in the paper: every token of the step counts once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipelinerl.rl.advantages.base import are_equal

_EPSILON = 1e-8


def normalize_batch(advantages: Sequence[float], tokens: Sequence[int]) -> list[float]:
    """(A - mean) / std over the tokens of the step.

    Args:
        advantages: one value per sample.
        tokens: trained tokens of each sample (its weight).

    Returns:
        Normalised advantages; all 0 if they are equal up to rounding.
    """
    total = sum(tokens)
    if total == 0 or are_equal([a for a, n in zip(advantages, tokens, strict=True) if n]):
        return [0.0] * len(advantages)
    middle = math.fsum(a * n for a, n in zip(advantages, tokens, strict=True)) / total
    variance = math.fsum(n * (a - middle) ** 2 for a, n in zip(advantages, tokens, strict=True)) / total
    return [(a - middle) / (math.sqrt(variance) + _EPSILON) for a in advantages]
