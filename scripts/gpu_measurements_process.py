"""One measurement as a process group: starting it, seeing when it may end, and ending it with all that it started.

A process belongs to a measurement if it is in its session or has its name in the environment, wherever it has moved;
no other is ever touched. `become_subreaper` has to be called before, so that orphans stay below this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil
from gpu_measurements_plan import Measurement, Until

MEASUREMENT_KEY = "PIPELINERL_MEASUREMENT"
#: From SIGTERM to SIGKILL: a run needs some 15 s to end its processes.
GRACE_S = 30.0
#: For what is left when a measurement's own processes have ended.
_LEFTOVER_GRACE_S = 5.0
#: How often the rows of a run are looked at.
WATCH_S = 3.0


class Watch:
    """Reads what is new in a file of metrics; `reached` once the last rows with a key are all high enough."""

    def __init__(self, file: Path, until: Until) -> None:
        self._file = file
        self._until = until
        self._position = 0
        self._in_a_row = 0

    def reached(self) -> bool:
        with contextlib.suppress(FileNotFoundError), self._file.open("rb") as lines:
            lines.seek(self._position)
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                self._position += len(line)
                self._take(line)
        return self._in_a_row >= self._until.times

    def _take(self, line: bytes) -> None:
        if self._in_a_row >= self._until.times or self._until.key.encode() not in line:
            return
        with contextlib.suppress(json.JSONDecodeError):
            value = json.loads(line).get(self._until.key)
            if value is not None:
                self._in_a_row = self._in_a_row + 1 if value >= self._until.at_least else 0


class Job:
    """A measurement that runs, or is being ended. Times are seconds of the caller's clock.

    Attributes:
        why: why it was ended: `reached`, `late`, `out of time` or `interrupted`; None: it was not.
        over: none of its processes is left.
    """

    def __init__(
        self,
        measurement: Measurement,
        cards: tuple[str, ...],
        command: Sequence[str],
        work: Path,
        folder: Path,
        environ: Mapping[str, str],
        now_s: float,
        end_s: float,
        grace_s: float = GRACE_S,
    ) -> None:
        self.measurement = measurement
        self.cards = cards
        self.command = list(command)
        self.work = work
        self.start_s = now_s
        self.why: str | None = None
        self.over = False
        self._grace_s = grace_s
        self._limit = min((now_s + measurement.limit_s, "late"), (end_s, "out of time"))
        self._kill_s: float | None = None
        self._seen_s = now_s
        self._told_leftovers = False
        until = measurement.until
        self._watch = None if until is None else Watch(work / until.file, until)
        work.mkdir(parents=True)
        own = {"CUDA_VISIBLE_DEVICES": ",".join(cards), MEASUREMENT_KEY: str(work)}
        with (work / "stdout.txt").open("wb") as output, (work / "stderr.txt").open("wb") as errors:
            self._process = subprocess.Popen(
                self.command, cwd=folder, env={**environ, **own}, stdout=output, stderr=errors, start_new_session=True
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode

    @property
    def next_s(self) -> float:
        """When it has to be looked at, whatever happens."""
        if self._kill_s is not None:
            return self._kill_s
        return self._limit[0] if self._watch is None else min(self._limit[0], self._seen_s + WATCH_S)

    def pids(self) -> list[int]:
        """Whose end is worth a look; none: it is worth one now."""
        first = [self._process.pid] if self._process.returncode is None else []
        if self._kill_s is None:
            return first
        return [*first, *(process.pid for process in self._living() if process.pid not in first)]

    def advance(self, now_s: float) -> None:
        """Do what is due: end it at its limit or goal, kill what outlasts the grace, notice that it is over."""
        ended = self._process.poll() is not None
        if self._kill_s is None and not ended:
            if now_s >= self._limit[0]:
                self.end(self._limit[1], now_s)
            elif self._watch is not None:
                self._seen_s = now_s
                if self._watch.reached():
                    self.end("reached", now_s)
            return
        living = self._living()
        if self._kill_s is not None and now_s >= self._kill_s:
            for process in living:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self._kill_s = now_s + 1.0
            living = self._living()
        elif living and ended and not self._told_leftovers and not self._group_lives(living):
            # What is left are sessions of their own, which the first signal did not reach.
            self._told_leftovers = True
            for process in living:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.terminate()
            self._kill_s = min(self._kill_s or now_s + _LEFTOVER_GRACE_S, now_s + _LEFTOVER_GRACE_S)
        elif living and ended and self._kill_s is None:
            with contextlib.suppress(ProcessLookupError):  # the last one may have ended since
                os.killpg(self._process.pid, signal.SIGTERM)
            self._kill_s = now_s + self._grace_s
        self.over = self._process.poll() is not None and not living

    def end(self, why: str, now_s: float) -> None:
        """SIGTERM to its process group; nothing if it is being ended already."""
        if self._kill_s is not None:
            return
        self.why = why
        self._kill_s = now_s + self._grace_s
        # Its first process is not reaped before `poll`, so the group's number is still its own.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)

    def _group_lives(self, living: Iterable[psutil.Process]) -> bool:
        for process in living:
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(process.pid) == self._process.pid:
                    return True
        return False

    def _living(self) -> list[psutil.Process]:
        """Its processes that have not ended."""
        found = []
        for process in psutil.Process().children(recursive=True):
            try:
                own = process.pid == self._process.pid
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if own or os.getsid(process.pid) == self._process.pid or self._has_name(process):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
                continue
        return found

    def _has_name(self, process: psutil.Process) -> bool:
        return process.environ().get(MEASUREMENT_KEY) == str(self.work)


def reap_orphans(jobs: Iterable[Job]) -> None:
    """Take note of the end of processes whose parents are gone; those of `jobs` themselves are left to them."""
    own = {job.pid for job in jobs}
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
            if process.pid not in own and process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)


def wait_any(pids: Iterable[int], timeout_s: float) -> None:
    """Block until one of the processes ends, or the time is over."""
    poller, files = select.poll(), []
    try:
        for pid in pids:
            try:
                files.append(os.pidfd_open(pid))
            except ProcessLookupError:
                return
            poller.register(files[-1], select.POLLIN)
        poller.poll(max(0.0, timeout_s) * 1000)
    finally:
        for file in files:
            os.close(file)
