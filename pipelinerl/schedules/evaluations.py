"""When an evaluation beside training is due. Pure; the actor runs by it, the trainer exports what will be measured."""

from __future__ import annotations


class EvaluationSchedule:
    """Says which evaluation is due, each once, also when versions jump.

    Args:
        every_n_versions: distance between evaluations beside training; 0: none.
        last_version: of the run; the final evaluation measures it, so nothing is due from there on.
    """

    def __init__(self, every_n_versions: int, last_version: int | None = None) -> None:
        self._every = every_n_versions
        self._last_version = last_version
        self._last_due = 0

    def start_at(self, version: int) -> None:
        """Take the evaluations up to `version` as made."""
        self._last_due = max(self._last_due, self._latest_multiple(version))

    def take_due(self, version: int) -> int | None:
        """Return the version that an evaluation is due at by now, or None. A jump over several gives the latest."""
        if self._last_version is not None and version >= self._last_version:
            return None
        latest = self._latest_multiple(version)
        if latest <= self._last_due:
            return None
        self._last_due = latest
        return latest

    def _latest_multiple(self, version: int) -> int:
        return version // self._every * self._every if self._every > 0 else 0
