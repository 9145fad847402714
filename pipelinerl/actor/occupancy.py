"""How full each server was: seconds without a rollout, and the mean number of rollouts. Pure; waits for nothing.

Told by `ServerSlots` of every slot that is taken or given back, and asked for every metric record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Occupancy:
    """Sums over the time since each server was last asked about.

    Args:
        busy: rollouts on each server now; the list that the owner changes.
        clock: seconds, monotonic.
    """

    def __init__(self, busy: Sequence[int], clock: Callable[[], float]) -> None:
        self._busy = busy
        self._clock = clock
        now = clock()
        self._begun = [now] * len(busy)
        self._counted = [now] * len(busy)
        self._idle_s = [0.0] * len(busy)
        self._rollout_s = [0.0] * len(busy)

    def add(self) -> None:
        """One more server, which is empty."""
        now = self._clock()
        self._begun.append(now)
        self._counted.append(now)
        self._idle_s.append(0.0)
        self._rollout_s.append(0.0)

    def before_change(self, server: int) -> None:
        """Count the time until now; the number of rollouts on `server` is about to change."""
        now = self._clock()
        seconds = now - self._counted[server]
        self._counted[server] = now
        count = self._busy[server]
        if count:
            self._rollout_s[server] += count * seconds
        else:
            self._idle_s[server] += seconds

    def take(self) -> dict[str, float]:
        """`actor/server_idle_s_<n>` and `actor/server_load_<n>` of the time since this was last called."""
        values = {}
        for server in range(len(self._busy)):
            self.before_change(server)
            seconds = self._counted[server] - self._begun[server]
            values[f"actor/server_idle_s_{server}"] = self._idle_s[server]
            values[f"actor/server_load_{server}"] = self._rollout_s[server] / seconds if seconds > 0 else 0.0
            self._begun[server] = self._counted[server]
            self._idle_s[server] = self._rollout_s[server] = 0.0
        return values
