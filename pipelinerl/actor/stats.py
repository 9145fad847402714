"""Rollout statistics: throughput, averages since the last report, and the failure limit."""

from __future__ import annotations

import math
from collections import Counter, deque
from time import monotonic

from pipelinerl.errors import WorkerError
from pipelinerl.records import RolloutSummary

_FAILURE_WINDOW = 256
_SHOWN_REASONS = 5


class Throughput:
    """Rates over the latest `size` rollouts."""

    def __init__(self, size: int) -> None:
        self._entries: deque[tuple[float, int, int]] = deque(maxlen=size)
        self._start = monotonic()

    def restart(self) -> None:
        """Start over, so that time without rollouts (an evaluation) does not count."""
        self._entries.clear()
        self._start = monotonic()

    def add(self, output_tokens: int, requests: int) -> None:
        """Count one rollout that ended now."""
        if len(self._entries) == self._entries.maxlen:
            self._start = self._entries[0][0]
        self._entries.append((monotonic(), output_tokens, requests))

    def rates(self) -> dict[str, float]:
        """Return tokens, rollouts and requests per second. The window ends now, so rates fall when nothing ends."""
        seconds = max(monotonic() - self._start, 1e-9)
        return {
            #: their sampled tokens, same window
            "actor/output_tokens_per_s": sum(tokens for _, tokens, _ in self._entries) / seconds,
            #: finished rollouts, over a sliding window of the last 50 groups
            "actor/rollouts_per_s": len(self._entries) / seconds,
            #: their requests to servers, same window
            "actor/requests_per_s": sum(requests for *_, requests in self._entries) / seconds,
        }


class RolloutAverages:
    """Means of reward, success and the user's metrics, over all rollouts and by data set."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}  # name -> [sum, number of values]

    def add(self, summary: RolloutSummary, dataset_name: str) -> None:
        """Add one rollout. Values that are not finite are skipped."""
        own = {"reward": summary.reward, "success": float(summary.success), **summary.metrics}
        values = {
            "actor/reward_mean": summary.reward,  #: mean reward
            "actor/success_rate": float(summary.success),  #: share of successful rollouts
            "actor/latency_s": summary.latency_s,  #: mean duration of a rollout, s
            "actor/samples_per_rollout": summary.num_samples,  #: mean number of samples per rollout
            "actor/output_tokens_per_rollout": summary.output_tokens,  #: mean number of sampled tokens per rollout
        }
        for metric, value in own.items():
            #: mean of `reward`, `success` and every field of the domain's own metrics, by data set
            values[f"actor/{dataset_name}/{metric}"] = value
        for name, value in values.items():
            if math.isfinite(value):
                entry = self._sums.setdefault(name, [0.0, 0])
                entry[0] += value
                entry[1] += 1

    def take(self) -> dict[str, float]:
        """Return the means and start over."""
        means = {name: total / count for name, (total, count) in self._sums.items()}
        self._sums = {}
        return means


class FailureLimit:
    """Ends the run if too many of the latest rollouts failed.

    Args:
        max_rate: largest share of failed rollouts.
        min_rollouts: finished rollouts before the rate counts.
    """

    def __init__(self, max_rate: float, min_rollouts: int) -> None:
        self._max_rate = max_rate
        self._min_rollouts = min_rollouts
        self._latest: deque[bool] = deque(maxlen=max(_FAILURE_WINDOW, min_rollouts))
        #: Failed rollouts so far, by reason.
        self.reasons: Counter[str] = Counter()

    def record_success(self) -> None:
        self._latest.append(False)

    def record_failure(self, reason: str, message: str) -> None:
        """Count a failed rollout.

        Raises:
            WorkerError: the rate exceeds the limit; the message has counts by reason and the last failure.
        """
        self.reasons[reason] += 1
        self._latest.append(True)
        count, failed = len(self._latest), sum(self._latest)
        if count >= self._min_rollouts and failed > self._max_rate * count:
            shown = ", ".join(f"{name}: {number}" for name, number in self.reasons.most_common(_SHOWN_REASONS))
            raise WorkerError(
                f"{failed} of the last {count} rollouts failed, more than actor.max_failure_rate={self._max_rate} "
                f"allows. Reasons so far: {shown}. Last one: {message}"
            )
