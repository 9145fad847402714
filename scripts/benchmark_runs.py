"""Whole runs as benchmark scripts start them: bounded in time, and why one failed in a line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: How long a run may take to end after it was told to, before it is killed.
_END_S = 45.0


def run_bounded(
    command: Sequence[str], folder: Path, output: Path, timeout_s: float, environ: Mapping[str, str]
) -> tuple[int, bool]:
    """Run `command` in `folder`; its exit code, and whether it was ended because its time was over."""
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=folder, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **environ}
        )
    try:
        return process.wait(timeout_s), False
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        try:
            return process.wait(_END_S), True
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL, True
    finally:
        # Its children notice its end and end too.
        process.kill()
        process.wait()


def summary_of(run_dir: Path) -> dict[str, Any] | None:
    """The summary that the run wrote; None: it did not come so far."""
    try:
        summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    except (OSError, json.JSONDecodeError):
        return None
    return summary


def last_line(run_dir: Path, output: Path) -> str:
    """Why a run failed, in one line: what its summary says, else the last line that says `error`, else the last."""
    reason = (summary_of(run_dir) or {}).get("reason")
    if reason:
        return " ".join(str(reason).split())
    lines = [line for line in output.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["it said nothing"])[-1]
