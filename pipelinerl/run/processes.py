"""Processes of the launcher: starting a job, the events that the supervisor waits on, and ending everything that
descends from a job, including what left its process group.

A thread per child sleeps in `wait`, so nothing polls. Children inherit the read end of the launcher's death pipe.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any, Literal

import msgspec
import psutil

from pipelinerl.records import PoolAnswer
from pipelinerl.role import JOB_KEY
from pipelinerl.run.last_error import LogPart, crash_note, last_error

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_KILL_S = 3.0


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `job` is the one to blame, if any. `signum` is the first signal that the launcher got, even if
    it came after a failure, which stays the reason. `has_lost_node`: a node of the cluster is gone."""

    status: Literal["completed", "failed", "interrupted"]
    reason: str | None
    exit_code: int
    job: str | None = None
    signum: int | None = None
    has_lost_node: bool = False


class ChildExited(msgspec.Struct, frozen=True):
    """A child exited. `returncode` is negative for the signal that killed it."""

    name: str
    returncode: int


class Interrupted(msgspec.Struct, frozen=True):
    """The launcher got a signal; with a `rank`, that node did, perhaps the same one: schedulers signal all nodes."""

    signum: int
    rank: int | None = None


class StreamFailed(msgspec.Struct, frozen=True):
    """The launcher can no longer follow a stream."""

    reason: str


class NodeLost(msgspec.Struct, frozen=True):
    """A node of the cluster is gone with all its jobs; `reason` completes `node 1 (host) ...`."""

    rank: int
    reason: str


Event = ChildExited | Interrupted | PoolAnswer | StreamFailed | NodeLost


@contextmanager
def signals_as_events(events: SimpleQueue[Event]) -> Iterator[list[int]]:
    """Put an `Interrupted` on `events` for each SIGINT, SIGTERM and SIGHUP (a `SimpleQueue` may be filled from a signal
    handler).

    Yields the numbers of the signals so far: while a run ends, nothing reads `events`.
    """
    received: list[int] = []

    def handle(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        events.put(Interrupted(signum))

    # Under nohup SIGHUP is ignored, and stays so.
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    before = {signum: signal.signal(signum, handle) for signum in _SIGNALS if signum not in ignored}
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@dataclass
class Child:
    """A running child. `pid` is also the id of its process group and session; `stdout` and `stderr` are its part of the
    job's logs (an earlier process of the same job wrote the part before). `started_at`: on the monotonic clock.
    `is_signalled`: the launcher signalled it. `send` signals the process, or with True its group; it may be one of
    another machine."""

    name: str
    pid: int
    stdout: LogPart
    stderr: LogPart
    started_at: float
    send: Callable[[int, bool], None]
    returncode: int | None = None
    is_signalled: bool = False
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def is_alive(self) -> bool:
        return self.returncode is None

    def end(self, returncode: int) -> None:
        """Note that the process has exited."""
        self.returncode = returncode
        self.ended.set()

    def last_words(self) -> str:
        """` Last error: ...`, unless a signal from elsewhere gave it no chance to say why it ends, and its log."""
        is_surprised = self.returncode is not None and self.returncode < 0 and not self.is_signalled
        note = (crash_note if is_surprised else last_error)(self.stdout, self.stderr)
        return f"{f' Last error: {note}' if note else ''}\nIts log: {self.stderr.file}"

    def signal(self, signum: int, to_group: bool = False) -> None:
        """Signal the process alone, or its group. SIGABRT makes it write the stacks of its threads to its stderr (it
        runs with PYTHONFAULTHANDLER=1)."""
        self.is_signalled = True
        self.send(signum, to_group)


def signal_process(pid: int, signum: int, to_group: bool) -> None:
    """Signal a process of this machine or its group, if it is still alive."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signum) if to_group else os.kill(pid, signum)


def spawn(
    name: str,
    argv: Sequence[str],
    environ: Mapping[str, str],
    folder: Path,
    events: SimpleQueue[Event],
    inherited_fds: Sequence[int] = (),
) -> Child:
    """Start `argv` in a new session, with stdout and stderr appended to files in `folder`; its exit becomes a
    `ChildExited` in `events`.

    Raises:
        OSError: the program cannot be started.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stdout_file, stderr_file = folder / "stdout.log", folder / "stderr.log"
    with stdout_file.open("ab") as out, stderr_file.open("ab") as err:
        stdout, stderr = LogPart(stdout_file, out.tell()), LogPart(stderr_file, err.tell())
        process = subprocess.Popen(
            argv,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            pass_fds=tuple(inherited_fds),
        )
    child = Child(name, process.pid, stdout, stderr, time.monotonic(), partial(signal_process, process.pid))

    def wait() -> None:
        returncode = process.wait()
        child.end(returncode)
        events.put(ChildExited(name, returncode))

    threading.Thread(target=wait, name=f"wait-{name}", daemon=True).start()
    return child


def kept(argv: Sequence[str]) -> list[str]:
    """A command that ends when this process does, however that ends, and leaves no process: `argv` with a keeper."""
    return [sys.executable, "-m", __name__, str(os.getpid()), *argv]


def _keep(parent: str, *argv: str) -> int:
    """The keeper: kills all processes below it in the end."""
    events: SimpleQueue[Any] = SimpleQueue()
    become_subreaper()
    with signals_as_events(events):
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):
            return 1
        process = subprocess.Popen(argv, preexec_fn=partial(_prctl, _PR_SET_PDEATHSIG, signal.SIGKILL))
        threading.Thread(target=lambda: events.put(process.wait()), daemon=True).start()
        event = events.get()
        # Parents come before their children, and tell nobody how those ended. What they were about to fork is next.
        while rest := psutil.Process().children(recursive=True):
            _send_signal(rest, signal.SIGKILL)
            psutil.wait_procs(rest, _KILL_S)
    return 128 + event.signum if isinstance(event, Interrupted) else int(event)


def describe_exit(returncode: int) -> str:
    """`exit code 1` or `killed by SIGKILL`, with the usual suspect for SIGKILL."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    hint = " (out of memory? see the kernel log)" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"


def become_subreaper() -> bool:
    """Have orphaned descendants re-parented to this process, so that they are found (Linux). False where the system
    cannot do it."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> bool:
    try:
        return bool(ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def end_all(job_pids: Collection[int], grace_s: float) -> list[int]:
    """SIGTERM to every process that descends from the jobs, SIGKILL to those that live after `grace_s`.

    Takes at most about `grace_s` + 6 s. Returns pids that survived even that.
    """
    _send_signal(_find_descendants(job_pids), signal.SIGTERM)
    wait_gone([process.pid for process in _find_descendants(job_pids)], grace_s)
    for _ in range(2):  # twice: a process may have been forked while the list was made
        rest = _find_descendants(job_pids)
        if not rest:
            break
        _send_signal(rest, signal.SIGKILL)
        wait_gone([process.pid for process in rest], _KILL_S)
    return [process.pid for process in _find_descendants(job_pids)]


def end_rest_of_job(pid: int, name: str) -> None:
    """SIGKILL what is left of a job whose first process `pid` has exited: its session, and processes with its name in
    the environment."""
    rest = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
            if os.getsid(process.pid) == pid or process.environ().get(JOB_KEY) == name:
                rest.append(process)
    _send_signal(rest, signal.SIGKILL)
    wait_gone([process.pid for process in rest], _KILL_S)
    for process in rest:  # orphans are children of the launcher by now
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used, all its threads together; 0 if it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return 0.0


def wait_gone(pids: Iterable[int], timeout_s: float) -> list[int]:
    """Block until all processes have exited or time is up; return those still alive. Does not poll (Linux)."""
    waiting: dict[int, int] = {}
    poller = select.poll()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            waiting[pidfd] = pid
            poller.register(pidfd, select.POLLIN)
    deadline = time.monotonic() + timeout_s
    try:
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            for pidfd, _ in poller.poll(left_s * 1000):
                poller.unregister(pidfd)
                os.close(pidfd)
                del waiting[pidfd]
        return list(waiting.values())
    finally:
        for pidfd in waiting:
            os.close(pidfd)


def _find_descendants(job_pids: Collection[int]) -> list[psutil.Process]:
    """Living processes below this one that belong to a job: it is one, runs in a job's session, carries a job's name in
    its environment, or descends from such a process. Other children of the launcher are left alone."""
    mine: set[int] = set(job_pids)
    found = []
    for process in psutil.Process().children(recursive=True):  # parents come before their children
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
            is_mine = not mine.isdisjoint((process.pid, process.ppid(), os.getsid(process.pid)))
            if is_mine or JOB_KEY in process.environ():
                mine.add(process.pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
    return found


def _send_signal(processes: Iterable[psutil.Process], signum: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signum)


if __name__ == "__main__":
    sys.exit(_keep(*sys.argv[1:]))
