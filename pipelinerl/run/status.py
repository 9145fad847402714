"""`python -m pipelinerl status RUN_DIR`: what a run and each of its processes are doing now.

Reads heartbeats, process ids and the trainer's last messages; sends nothing to any process and waits for nothing. Works
from any terminal of the machine that the processes run on, on running and on ended runs.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from pipelinerl.commands import typed
from pipelinerl.errors import ConfigError, StreamError
from pipelinerl.records import StepDone, TrainerMessage
from pipelinerl.records.lineage import Lineage
from pipelinerl.rundir.heartbeat import HeartbeatState, read_heartbeat
from pipelinerl.rundir.layout import RunDir, newest_training_state
from pipelinerl.streams.base import TRAINER, TRAINER_TOPIC
from pipelinerl.streams.open_run import StartedRun, find_run, open_streams
from pipelinerl.streams.read import read_all
from pipelinerl.tracking.health import Finding, newest_findings

_SILENT_S = 10.0


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One process. Ages are seconds before now; None where the process left no heartbeat."""

    name: str
    pid: int | None = None
    is_alive: bool = False
    waiting_for: str | None = None
    waiting_s: float | None = None
    deadline_s: float | None = None
    progress: int | None = None
    progress_age_s: float | None = None
    heartbeat_age_s: float | None = None


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The run: `state` is running, completed, failed, interrupted, or ended (its launcher was killed)."""

    run_id: str
    run_dir: str
    starts: int
    state: str
    reason: str | None
    step: int | None
    max_steps: int | None
    step_age_s: float | None
    checkpoint: int | None
    findings: list[Finding]
    jobs: list[JobStatus]


def read_status(run: StartedRun, now: float | None = None) -> RunStatus:
    """Gather the status of `run` at `now` (epoch seconds)."""
    return status_of(run, *_last_step(run), now)


def status_of(run: StartedRun, step: int | None, step_time: float | None, now: float | None = None) -> RunStatus:
    """The same, given the last step and its time: reads no stream."""
    now = time.time() if now is None else now
    state, reason = _state(run)
    return RunStatus(
        run_id=run.identity.run_id,
        run_dir=str(run.run_dir.root),
        starts=run.identity.incarnation + 1,
        state=state,
        reason=reason,
        step=step,
        max_steps=run.config.finetune.last_step if run.config.finetune.known_steps else None,
        step_age_s=None if step_time is None else max(0.0, now - step_time),
        checkpoint=newest_training_state(run.run_dir),
        findings=newest_findings(run.run_dir.findings_file),
        jobs=[_job_status(run.run_dir, job.name, now) for job in run.world.jobs],
    )


def _state(run: StartedRun) -> tuple[str, str | None]:
    if run.is_running:
        return "running", None
    try:
        summary = msgspec.json.decode(run.run_dir.summary_file.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return "ended", "the launcher was killed before it could write summary.json; start it again to continue"
    except msgspec.MsgspecError as error:
        return "ended", f"summary.json cannot be read: {error}"
    return str(summary.get("status")), summary.get("reason")


def _last_step(run: StartedRun) -> tuple[int | None, float | None]:
    """(last step of the current lineage, its time); None if the stream cannot be read."""
    lineage, times = Lineage(), dict[int, float]()
    try:
        with open_streams(run) as streams:
            for message in read_all(streams, TRAINER_TOPIC, TRAINER, TrainerMessage):
                lineage.add(message)
                if isinstance(message, StepDone):
                    times[message.step] = message.time
    except (StreamError, ConfigError):
        return None, None
    return lineage.last_step, times.get(lineage.last_step)


def _job_status(run_dir: RunDir, name: str, now: float) -> JobStatus:
    beat = read_heartbeat(run_dir.heartbeat_file(name))
    if beat is None:
        return JobStatus(name=name)
    age_s = max(0.0, now - beat.time)
    is_alive = _is_alive(beat, run_dir.root, name)
    is_waiting = is_alive and beat.waited_s is not None
    return JobStatus(
        name=name,
        pid=beat.pid,
        is_alive=is_alive,
        waiting_for=beat.waiting_for if is_waiting else None,
        waiting_s=(beat.waited_s or 0.0) + age_s if is_waiting else None,
        deadline_s=beat.deadline_s if is_waiting else None,
        progress=beat.progress,
        progress_age_s=beat.idle_s + age_s,
        heartbeat_age_s=age_s,
    )


def _is_alive(beat: HeartbeatState, root: Path, name: str) -> bool:
    """Whether the process that wrote the heartbeat is alive; its id may have been reused."""
    try:
        process = psutil.Process(beat.pid)
        words = process.cmdline()
        return process.status() != psutil.STATUS_ZOMBIE and str(root) in words and name in words
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def print_status(status: RunStatus, console: Console) -> None:
    """Print a few lines about the run, then one per process."""
    step = f"step {'unknown' if status.step is None else status.step}"
    if status.max_steps is not None:
        step += f" of {status.max_steps}"
    if status.step_age_s is not None:
        step += f", {format_seconds(status.step_age_s)} ago"
    checkpoint = "none" if status.checkpoint is None else f"step {status.checkpoint}"
    console.print(f"run {status.run_id} in {status.run_dir}: {status.state} (start {status.starts})", markup=False)
    console.print(f"{step}; newest training state: {checkpoint}", markup=False)
    if status.reason:
        console.print(f"reason: {status.reason}", markup=False)
    for finding in status.findings:
        console.print(finding.line, markup=False)
    table = Table(box=None, pad_edge=False)
    for name in ("process", "pid", "progress"):
        table.add_column(name, no_wrap=True)
    table.add_column("state")
    for job in status.jobs:
        progress = f"{job.progress}, {format_seconds(job.progress_age_s or 0)} ago" if job.progress else "-"
        table.add_row(job.name, str(job.pid or "-"), progress, _doing(job))
    console.print(table)


def _doing(job: JobStatus) -> str:
    if job.pid is None:
        return "never started"
    silent_s = job.heartbeat_age_s or 0.0
    if not job.is_alive:
        return f"ended (last sign of life {format_seconds(silent_s)} ago)"
    silent = f"; no sign of life for {format_seconds(silent_s)}" if silent_s > _SILENT_S else ""
    if job.waiting_s is None:
        return f"working{silent}"
    limit = "" if job.deadline_s is None else f" (at most {format_seconds(job.deadline_s)})"
    return f"waiting for {job.waiting_for} for {format_seconds(job.waiting_s)}{limit}{silent}"


def format_seconds(seconds: float) -> str:
    """`12 s`, `3 min 20 s`, `5 h 2 min` or `3 d 4 h`."""
    whole = max(0, int(seconds))
    for size, large, part, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {large} {whole % size // part} {small}"
    return f"{whole} s"


def main(argv: list[str]) -> int:
    """Print the status of the run that `argv` names; return 0."""
    parser = argparse.ArgumentParser(
        prog=typed("status"),
        description="Show every process of a run: alive or not, what it waits for and for how long, its progress.",
        epilog="Exit code 0, also for a run that failed; 2: not the directory of a run.",
    )
    parser.add_argument("run_dir", help="output_dir of the run")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    args = parser.parse_args(argv)
    status = read_status(find_run(args.run_dir))
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(status)).decode())
    else:
        print_status(status, Console(highlight=False))
    return 0
