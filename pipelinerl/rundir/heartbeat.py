"""Heartbeat files: what a process waits for, since when, and its progress.

A recent beat only says that the process exists. Whether it is stuck follows from the deadline of its wait and the time
since its last progress. All durations are measured with monotonic clocks: those in a beat by the process, the age of a
beat by its reader.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from pipelinerl.rundir.durable import replace_file

logger = logging.getLogger(__name__)


class HeartbeatState(msgspec.Struct, frozen=True, kw_only=True):
    """One beat, `uptime_s` after the start of the process. `time` (seconds since the epoch) is only for display.

    `progress` counts units of work since the start; it last grew `idle_s` before the beat. The process has waited
    `waited_s` for something that may take `deadline_s`.
    """

    pid: int
    time: float
    uptime_s: float = 0.0
    progress: int = 0
    idle_s: float = 0.0
    waiting_for: str | None = None
    waited_s: float | None = None
    deadline_s: float | None = None

    def overdue_s(self, age_s: float) -> float:
        """Seconds that the process is past the deadline of its wait, `age_s` after the beat; 0 if it is not."""
        if self.waited_s is None or self.deadline_s is None:
            return 0.0
        return max(0.0, self.waited_s + age_s - self.deadline_s)


class _Wait(msgspec.Struct, frozen=True):
    what: str
    since: float
    deadline_s: float | None

    @property
    def ends(self) -> float:
        return float("inf") if self.deadline_s is None else self.since + self.deadline_s


class Heartbeat:
    """Writes the state of this process to `file` every `interval_s` from a background thread.

    The file is replaced atomically. A failed write costs one warning. All methods are thread-safe.

    Args:
        file: where the state goes; its folder is created.
        interval_s: time between two beats.
    """

    def __init__(self, file: Path, interval_s: float) -> None:
        self._file = file
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._waits: dict[int, _Wait] = {}
        self._next_wait = 0
        self._progress = 0
        self._started = self._progressed = time.monotonic()
        self._stopped = threading.Event()
        self._warned = False
        self._thread: threading.Thread | None = None

    def start(self) -> Heartbeat:
        """Write the first beat now, the others from a daemon thread."""
        self.beat()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """End the thread and write a last beat. May be called twice, and without `start`."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self.beat()

    def __enter__(self) -> Heartbeat:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def progress(self, n: int = 1) -> None:
        """Count `n` finished units of work."""
        with self._lock:
            self._progress += n
            self._progressed = time.monotonic()

    @contextmanager
    def waiting(self, what: str, deadline_s: float | None = None) -> Iterator[None]:
        """Report that this process waits for `what`; after `deadline_s` seconds the supervisor treats it as stuck.

        Waits may nest and run in several threads or tasks; the one with the earliest deadline is reported.
        """
        with self._lock:
            key, self._next_wait = self._next_wait, self._next_wait + 1
            self._waits[key] = _Wait(what, time.monotonic(), deadline_s)
        try:
            yield
        finally:
            with self._lock:
                del self._waits[key]

    def state(self) -> HeartbeatState:
        """The state that `beat` writes."""
        with self._lock:
            wait = min(self._waits.values(), key=lambda wait: (wait.ends, wait.since), default=None)
            now = time.monotonic()
            return HeartbeatState(
                pid=os.getpid(),
                time=time.time(),
                uptime_s=now - self._started,
                progress=self._progress,
                idle_s=now - self._progressed,
                waiting_for=wait.what if wait else None,
                waited_s=now - wait.since if wait else None,
                deadline_s=wait.deadline_s if wait else None,
            )

    def beat(self) -> None:
        """Write the state now."""
        try:
            replace_file(self._file, msgspec.json.encode(self.state()))
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning("the heartbeat %s cannot be written: %s", self._file, error)

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self.beat()


def read_heartbeat(path: Path) -> HeartbeatState | None:
    """Return the last beat in `path`; None if there is none yet or the file is not a heartbeat."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=HeartbeatState)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        logger.warning("the heartbeat %s cannot be read: %s", path, error)
        return None
