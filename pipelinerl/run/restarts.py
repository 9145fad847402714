"""How often and how soon a process is started again. Pure; used for servers and for whole runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipelinerl.errors import EXIT_RUN_FAILED

MAX_BACKOFF_S = 60.0
#: Jobs whose death ends the run, which can then be resumed.
RESUMED_KINDS = ("finetune", "actor", "preprocessor")


def can_resume(status: str, exit_code: int, job: str | None) -> bool:
    """Whether a run that ended so may be continued without anybody changing anything.

    Args:
        status: of the outcome.
        exit_code: of the launcher; user errors would only be made again.
        job: the one to blame.
    """
    kind = (job or "").rpartition("_")[0]
    return status == "failed" and exit_code == EXIT_RUN_FAILED and kind in RESUMED_KINDS


@dataclass
class RestartBudget:
    """At most `cap` restarts within `window_s` seconds (None: ever); restart k waits `backoff_s * 2 ** k`, capped."""

    cap: int
    backoff_s: float
    window_s: float | None = None
    _times: list[float] = field(default_factory=list)

    def used(self, now: float) -> int:
        """Restarts that count at `now` (seconds)."""
        if self.window_s is not None:
            self._times = [time for time in self._times if now - time < self.window_s]
        return len(self._times)

    def take(self, now: float) -> float | None:
        """Spend one restart; returns the seconds to wait before it, or None if there is none left."""
        used = self.used(now)
        if used >= self.cap:
            return None
        self._times.append(now)
        return min(self.backoff_s * 2.0**used, MAX_BACKOFF_S)
