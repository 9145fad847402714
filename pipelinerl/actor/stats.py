"""Throughput over a sliding window, and averages of what rollouts came to since the last report. Pure.

Called by the actor for every rollout and for every metric record. The clock is passed in; waits for nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from pipelinerl.records import RolloutSummary


class ThroughputWindow:
    """Rates over the latest `size` rollouts.

    Args:
        size: rollouts in the window.
        clock: seconds, monotonic.
    """

    def __init__(self, size: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: deque[tuple[float, int, int]] = deque(maxlen=size)
        self._start = clock()

    def restart(self) -> None:
        """Forget everything, so that a pause without rollouts (an evaluation) does not count."""
        self._entries.clear()
        self._start = self._clock()

    def add(self, output_tokens: int, requests: int) -> None:
        """Note one rollout that ended now."""
        if len(self._entries) == self._entries.maxlen:
            self._start = self._entries[0][0]
        self._entries.append((self._clock(), output_tokens, requests))

    def rates(self) -> dict[str, float]:
        """Return tokens, rollouts and requests per second; the window ends now, so rates fall when nothing ends."""
        seconds = max(self._clock() - self._start, 1e-9)
        tokens = sum(entry[1] for entry in self._entries)
        requests = sum(entry[2] for entry in self._entries)
        return {
            "actor/output_tokens_per_s": tokens / seconds,
            "actor/rollouts_per_s": len(self._entries) / seconds,
            "actor/requests_per_s": requests / seconds,
        }


class RolloutAverages:
    """Means of reward, success and the user's own metrics, in all and by data set."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}  # name -> [sum, number of values]

    def add(self, summary: RolloutSummary, dataset_name: str) -> None:
        """Note one rollout that came to an end."""
        self._add("actor/reward_mean", summary.reward)
        self._add("actor/success_rate", float(summary.success))
        self._add("actor/latency_s", summary.latency_s)
        self._add("actor/samples_per_rollout", summary.num_samples)
        self._add("actor/output_tokens_per_rollout", summary.output_tokens)
        for name, value in {"reward": summary.reward, "success": float(summary.success), **summary.metrics}.items():
            self._add(f"actor/{dataset_name}/{name}", value)

    def take(self) -> dict[str, float]:
        """Return the means and start again."""
        means = {name: total / count for name, (total, count) in self._sums.items()}
        self._sums = {}
        return means

    def _add(self, name: str, value: float) -> None:
        if math.isfinite(value):
            entry = self._sums.get(name)
            if entry is None:
                self._sums[name] = [value, 1]
            else:
                entry[0] += value
                entry[1] += 1
