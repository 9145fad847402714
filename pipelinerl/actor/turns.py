"""Whose turn it is in a mix of domains: each gets its share, give or take one problem. Pure.

Called by the order of problems. The turns follow from the shares alone, so a restart finds them again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping


class Turns:
    """Endless turns by `shares` (weights, which need not add up to 1)."""

    def __init__(self, shares: Mapping[str, float]) -> None:
        total = math.fsum(shares.values())
        self._shares = {name: share / total for name, share in shares.items()}
        self._taken = dict.fromkeys(shares, 0)
        self._turns: list[tuple[str, int]] = []

    def __getitem__(self, number: int) -> tuple[str, int]:
        """Return whose turn number `number` is, from 0, and how many turns it had before."""
        while len(self._turns) <= number:
            count = len(self._turns) + 1
            # The one that is furthest behind its share of `count` turns.
            name = max(self._shares, key=lambda each: self._shares[each] * count - self._taken[each])
            self._turns.append((name, self._taken[name]))
            self._taken[name] += 1
        return self._turns[number]
