"""Is a job stuck? Judged from its heartbeat file, the clock and the deadlines; used by the supervisor on every tick.

A process is stuck if it stopped beating, waits for something longer than the deadline that it set itself, or counts
progress and has not made any for too long. What it waits for is part of the message.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from pipelinerl.config.sections import SuperviseConfig


class Beat(msgspec.Struct, frozen=True):
    """Content of a heartbeat file. Times are seconds since the epoch; `progress` counts what the role counts."""

    pid: int
    time: float
    waiting_for: str | None = None
    waiting_since: float | None = None
    deadline_s: float | None = None
    progress: float = 0


def read_beat(file: Path) -> Beat | None:
    """The last heartbeat, or None if there is none (the file is written atomically)."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Beat)
    except FileNotFoundError:
        return None


@dataclass
class StuckMonitor:
    """Judges one set of jobs over time. `start_timeout_s` bounds the time to the first heartbeat."""

    config: SuperviseConfig
    start_timeout_s: float
    _progress: dict[str, tuple[float, float]] = field(default_factory=dict)

    def judge(self, name: str, pid: int, started_at: float, beat: Beat | None, now: float) -> str | None:
        """Why the job counts as stuck, completing `<job> ...`; None if it is fine. All times in epoch seconds."""
        if beat is None or beat.pid != pid or beat.time < started_at - 1:
            if now - started_at > self.start_timeout_s:
                return f"gave no sign of life for {now - started_at:.0f} s after its start"
            return None
        silent_s = now - beat.time
        waiting = f" while waiting for {beat.waiting_for}" if beat.waiting_for else ""
        if silent_s > self.config.heartbeat_timeout_s:
            return f"stopped responding {silent_s:.0f} s ago{waiting} (no heartbeat)"
        if beat.waiting_for and beat.waiting_since is not None:
            waited_s = now - beat.waiting_since
            # The process reports its own time-out with more detail: give it a moment to do so.
            if beat.deadline_s is not None and waited_s > beat.deadline_s + 2 * self.config.heartbeat_interval_s:
                return f"waited {waited_s:.0f} s for {beat.waiting_for} (deadline {beat.deadline_s:.0f} s)"
        return self._judge_progress(name, beat, now)

    def _judge_progress(self, name: str, beat: Beat, now: float) -> str | None:
        value, since = self._progress.get(name, (0.0, now))
        if beat.progress != value or name not in self._progress:
            self._progress[name] = (beat.progress, now)
            return None
        if beat.progress > 0 and now - since > self.config.progress_timeout_s:
            waiting = f", waiting for {beat.waiting_for}" if beat.waiting_for else ""
            return f"made no progress for {now - since:.0f} s{waiting}"
        return None
