"""What the processes of a run wait for when it is stopped. Called by the supervisor; waits for nothing.

A run that was stopped because it did not come on says with this where it stood.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pipelinerl.run.processes import Child
from pipelinerl.rundir.heartbeat import HeartbeatState, read_heartbeat
from pipelinerl.rundir.layout import RunDir

#: Shorter waits are no news in the reason of a run that was stopped.
LONG_WAIT_S = 30.0


def describe_waits(started_at: Mapping[str, float], beats: Mapping[str, HeartbeatState], now: float) -> str:
    """What each process has been waiting for for long, as `; at that time ...`; "" if none has.

    Args:
        started_at: when each living process was started, by name (epoch seconds).
        beats: the last sign of life of those that gave one.
        now: epoch seconds.
    """
    waits = []
    for name, start in started_at.items():
        beat = beats.get(name)
        since = start if beat is None else beat.waiting_since
        if since is not None and now - since >= LONG_WAIT_S:
            what = "had given no sign of life for" if beat is None else "had waited"
            waits.append(f"{name} {what} {now - since:.0f} s" + ("" if beat is None else f" for {beat.waiting_for}"))
    return f"; at that time {', '.join(waits)}" if waits else ""


def waits_of(children: Iterable[Child], run_dir: RunDir, now: float) -> str:
    """`describe_waits` of those of `children` that live, from their heartbeats."""
    living = [child for child in children if child.returncode is None]
    beats = {child.name: read_heartbeat(run_dir.heartbeat_file(child.name)) for child in living}
    # What a process of an earlier start wrote is no sign of life of this one.
    own = {child.name: beat for child in living if (beat := beats[child.name]) and beat.pid == child.pid}
    return describe_waits({child.name: child.started_at for child in living}, own, now)
