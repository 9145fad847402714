"""The line that plain output has when nothing happened for a while: what the run is waiting for.

Called by the collector for the plain display. Reads the heartbeats of this node's processes; waits for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipelinerl.config import RunConfig
from pipelinerl.config.stages import has_stage
from pipelinerl.rundir.heartbeat import HeartbeatState, read_heartbeat
from pipelinerl.rundir.layout import RunDir
from pipelinerl.tracking.state import RunState
from pipelinerl.tracking.table import SERVER_BUSY
from pipelinerl.world import Job

#: What the trainer waits for while a step is being collected.
COLLECTING = "training data"
#: What processes wait for until a run is under way.
START_WAITS = ("the dataset loader", "servers to start", "the first weight update")
_MAX_NAMED = 4
_LONG_WAIT_S = 60.0


def read_beats(run_dir: RunDir, jobs: Sequence[Job], since: float) -> dict[str, HeartbeatState | None]:
    """The newest heartbeat of each of `jobs`; None where there is none since `since` (epoch seconds)."""
    beats = {job.name: read_heartbeat(run_dir.heartbeat_file(job.name)) for job in jobs}
    return {name: beat if beat is not None and beat.time >= since else None for name, beat in beats.items()}


def quiet_line(
    state: RunState, config: RunConfig, beats: Mapping[str, HeartbeatState | None], now: float, since: float
) -> str:
    """Say what the run is doing, on one line.

    Args:
        state: of the run, read only.
        beats: the newest sign of life of each process, None if it gave none yet.
        now: epoch seconds.
        since: when the run was started, epoch seconds.
    """
    waits = [(name, beat) for name, beat in beats.items() if beat is not None and beat.waiting_for is not None]
    silent = [name for name, beat in beats.items() if beat is None]
    if silent or any(beat.waiting_for in START_WAITS for _, beat in waits):
        parts = [f"{name} loads its libraries" for name in silent]
        parts += [_wait_text(name, beat, now) for name, beat in waits if beat.waiting_for in START_WAITS]
        return f"starting, {now - since:.0f} s so far: {_named(parts)}"
    if state.training_done:
        return "training is done: the last evaluation is going on"
    if not has_stage(config, "finetune"):
        return f"{_sampling(state)}{_long_waits(waits, now)}"
    if config.test_dataset_names and not state.evaluations and state.steps == 0:
        return f"step 0: the evaluation before training is going on{_long_waits(waits, now)}"
    known = config.finetune.known_steps
    step = f"step {state.steps + 1}/{known}" if known else f"step {state.steps + 1}"
    trainer = next((beat for name, beat in waits if name == "finetune_0"), None)
    if trainer is None:
        return f"{step}: the trainer works; {_ready(state)} samples are ready for it"
    if trainer.waiting_for != COLLECTING:
        return f"{step}: {_wait_text('the trainer', trainer, now)}"
    return f"{step}: {_ready(state)} of {config.finetune.samples_per_step} samples are ready, {_sampling(state)}"


def _ready(state: RunState) -> str:
    """Samples of complete groups that have no fate yet."""
    admitted, in_flight = state.latest.get("actor/admitted_samples"), state.latest.get("actor/in_flight_samples")
    return "?" if admitted is None or in_flight is None else f"{max(0.0, admitted - in_flight):.0f}"


def _sampling(state: RunState) -> str:
    latest = state.latest
    running = sum(value for name, value in latest.items() if SERVER_BUSY.fullmatch(name))
    text = f"{latest.get('actor/rollouts_per_s', 0.0):.1f} rollouts/s, {running:.0f} running"
    failed = latest.get("actor/failed_rollouts", 0.0)
    return f"{text}, {failed:.0f} failed" if failed else text


def _long_waits(waits: Sequence[tuple[str, HeartbeatState]], now: float) -> str:
    long = [(name, beat) for name, beat in waits if now - (beat.waiting_since or now) >= _LONG_WAIT_S]
    return f" ({_named([_wait_text(name, beat, now) for name, beat in long])})" if long else ""


def _wait_text(name: str, beat: HeartbeatState, now: float) -> str:
    return f"{name} waits for {beat.waiting_for} ({now - (beat.waiting_since or now):.0f} s)"


def _named(parts: Sequence[str]) -> str:
    more = f", and {len(parts) - _MAX_NAMED} more" if len(parts) > _MAX_NAMED else ""
    return ", ".join(parts[:_MAX_NAMED]) + more
