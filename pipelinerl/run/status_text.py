"""A run's status as text for the terminal. Pure but for the width of the terminal; called by the command `status`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from pipelinerl.run.status import JobStatus, RunStatus

_SILENT_S = 10.0


def print_status(status: RunStatus, console: Console) -> None:
    """A few lines about the run, then one for each of its processes."""
    done = "unknown" if status.step is None else str(status.step)
    step = f"step {done}" if status.max_steps is None else f"step {done} of {status.max_steps}"
    if status.step_age_s is not None:
        step += f", {format_seconds(status.step_age_s)} ago"
    checkpoint = "none" if status.checkpoint is None else f"step {status.checkpoint}"
    console.print(f"run {status.run_id} in {status.run_dir}: {status.state} (start {status.starts})", markup=False)
    console.print(f"{step}; newest training state: {checkpoint}", markup=False)
    if status.reason:
        console.print(f"reason: {status.reason}", markup=False)
    table = Table(box=None, pad_edge=False)
    for name in ("process", "pid", "progress"):
        table.add_column(name, no_wrap=True)
    table.add_column("what it does")
    for job in status.jobs:
        table.add_row(job.name, str(job.pid or "-"), _progress(job), _doing(job))
    console.print(table)


def _progress(job: JobStatus) -> str:
    if not job.progress or job.progress_age_s is None:
        return "-"
    return f"{job.progress}, {format_seconds(job.progress_age_s)} ago"


def _doing(job: JobStatus) -> str:
    if job.pid is None:
        return "never started"
    if not job.is_alive:
        return f"ended (last sign of life {format_seconds(job.heartbeat_age_s or 0)} ago)"
    silent_s = job.heartbeat_age_s or 0.0
    silent = f"; no sign of life for {format_seconds(silent_s)}" if silent_s > _SILENT_S else ""
    if job.waiting_for is None or job.waiting_s is None:
        return f"alive, works{silent}"
    limit = "" if job.deadline_s is None else f" (at most {format_seconds(job.deadline_s)})"
    return f"alive, waits for {job.waiting_for} since {format_seconds(job.waiting_s)}{limit}{silent}"


def format_seconds(seconds: float) -> str:
    """`12 s`, `3 min 20 s`, `5 h 2 min` or `3 d 4 h`."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"
