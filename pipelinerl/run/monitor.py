"""Is a job stuck? Judged from its heartbeat file, the clock and the deadlines; used by the supervisor on every tick.

A process is stuck if it stopped beating, waits for something longer than the deadline that it set itself, or counts
progress and has not made any for too long. What it waits for is part of the message.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipelinerl.config.sections import SuperviseConfig
from pipelinerl.rundir.heartbeat import HeartbeatState


@dataclass(frozen=True)
class StuckMonitor:
    """The deadlines of a run. `start_timeout_s` bounds the time to the first heartbeat."""

    config: SuperviseConfig
    start_timeout_s: float

    def judge(self, pid: int, started_at: float, beat: HeartbeatState | None, now: float) -> str | None:
        """Why the job counts as stuck, completing `<job> ...`; None if it is fine. All times in epoch seconds."""
        if beat is None or beat.pid != pid or beat.time < started_at - 1:
            if now - started_at > self.start_timeout_s:
                return f"gave no sign of life for {now - started_at:.0f} s after its start"
            return None
        waiting = f" while waiting for {beat.waiting_for}" if beat.waiting_for else ""
        if now - beat.time > self.config.heartbeat_timeout_s:
            return f"stopped responding {now - beat.time:.0f} s ago{waiting} (no heartbeat)"
        # A process reports its own time-out with more detail: give it a moment to do so.
        if beat.overdue_s(now) > 2 * self.config.heartbeat_interval_s:
            waited_s = beat.overdue_s(now) + (beat.deadline_s or 0)
            return f"waited {waited_s:.0f} s for {beat.waiting_for} (deadline {beat.deadline_s:.0f} s)"
        idle_s = now - beat.progress_time
        if beat.progress > 0 and idle_s > self.config.progress_timeout_s:
            return f"made no progress for {idle_s:.0f} s{waiting}"
        return None
