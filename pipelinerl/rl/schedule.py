"""Coefficients that move linearly over training (KL, entropy bonus). No torch."""

from __future__ import annotations


def linear_coefficient(start: float, final: float | None, step: int, max_steps: float) -> float:
    """`start` at step 1, `final` at `max_steps`, a straight line between; constant if `final` is None.

    `step` counts from 1 as optimizer steps do; steps beyond `max_steps` stay at `final`.
    """
    if final is None:
        return start
    if max_steps <= 1:
        return final
    share = min(max((step - 1) / (max_steps - 1), 0.0), 1.0)
    return start + (final - start) * share
