"""Counts failed rollouts and ends the run when too many of the latest ones failed. Pure; waits for nothing.

Called by the actor for every training rollout that ended.
"""

from __future__ import annotations

from collections import Counter, deque

from pipelinerl.errors import WorkerError

_WINDOW = 256
_SHOWN_REASONS = 5


class FailureLimit:
    """Failure rate over the latest rollouts.

    Args:
        max_rate: share of failed rollouts above which the run ends.
        min_rollouts: rollouts that must have ended before the rate means anything.
    """

    def __init__(self, max_rate: float, min_rollouts: int) -> None:
        self._max_rate = max_rate
        self._min_rollouts = min_rollouts
        self._latest: deque[bool] = deque(maxlen=max(_WINDOW, min_rollouts))
        self._failed = 0
        self._last_message = ""
        self.reasons: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """All failed rollouts so far."""
        return self.reasons.total()

    def record_success(self) -> None:
        self._push(False)

    def record_failure(self, reason: str, message: str) -> None:
        """Count a failed rollout.

        Raises:
            WorkerError: the rate is above the limit; the message has the counts by reason and the last message.
        """
        self.reasons[reason] += 1
        self._last_message = message
        self._push(True)
        count = len(self._latest)
        if count >= self._min_rollouts and self._failed > self._max_rate * count:
            shown = ", ".join(f"{name}: {number}" for name, number in self.reasons.most_common(_SHOWN_REASONS))
            raise WorkerError(
                f"{self._failed} of the last {count} rollouts failed, more than actor.max_failure_rate="
                f"{self._max_rate} allows. Reasons so far: {shown}. Last one: {self._last_message}"
            )

    def _push(self, failed: bool) -> None:
        if len(self._latest) == self._latest.maxlen:
            self._failed -= self._latest[0]
        self._latest.append(failed)
        self._failed += failed
