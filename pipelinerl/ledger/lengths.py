"""Are long samples lost more often than short ones? Compares two sets of lengths. Pure; called by the ledger."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import msgspec


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """Output tokens of some samples; all 0 if there are none."""

    count: int
    mean: float
    p10: int
    p50: int
    p90: int
    max: int


class LengthComparison(msgspec.Struct, frozen=True, kw_only=True):
    """`longer_share` is the probability that a lost sample is longer than a trained one, ties counted half (the
    statistic of Mann and Whitney, divided by the number of pairs): 0.5 without a bias, None if a side is empty."""

    trained: Lengths
    lost: Lengths
    longer_share: float | None


def describe(lengths: Sequence[int]) -> Lengths:
    """Mean and quantiles (the smallest value with at least that share at or below it)."""
    ordered = sorted(lengths)
    count = len(ordered)
    if not count:
        return Lengths(count=0, mean=0.0, p10=0, p50=0, p90=0, max=0)

    def quantile(percent: int) -> int:
        return ordered[max(0, -(-count * percent // 100) - 1)]

    return Lengths(
        count=count,
        mean=sum(ordered) / count,
        p10=quantile(10),
        p50=quantile(50),
        p90=quantile(90),
        max=ordered[-1],
    )


def compare(trained: Sequence[int], lost: Sequence[int]) -> LengthComparison:
    """Compare the lengths of trained samples with those of lost ones."""
    return LengthComparison(trained=describe(trained), lost=describe(lost), longer_share=_longer_share(trained, lost))


def _longer_share(trained: Sequence[int], lost: Sequence[int]) -> float | None:
    if not trained or not lost:
        return None
    ordered = sorted(trained)
    halves = sum(bisect_left(ordered, length) + bisect_right(ordered, length) for length in lost)
    return halves / 2 / (len(trained) * len(lost))
