"""How much of the problems has had its turn: passes over the order of problems that came to their end. Pure.

Called by the training rollouts for every group that ended, whatever became of it. Waits for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable


class Passes:
    """Counts the leading places of the order whose groups have all ended, so that a slow problem is waited for.

    Args:
        num_problems: places of one pass.
    """

    def __init__(self, num_problems: int) -> None:
        self._num_problems = num_problems
        self._leading = 0
        self._ahead: set[int] = set()

    @property
    def epochs_done(self) -> float:
        """Passes that are done; 1.5: the first one, and half of the second."""
        return self._leading / self._num_problems

    def resume(self, numbers_due: Iterable[int], next_number: int) -> None:
        """Stand where a run before stood: all places below `next_number` but `numbers_due` have ended."""
        due = set(numbers_due)
        self._leading = min(due, default=next_number)
        self._ahead = set(range(self._leading, next_number)) - due

    def end(self, number: int) -> None:
        """The group at place `number` of the order ended."""
        self._ahead.add(number)
        while self._leading in self._ahead:
            self._ahead.remove(self._leading)
            self._leading += 1
