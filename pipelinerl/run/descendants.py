"""Finding and ending every process that descends from a set of jobs, those that left their process group included.

Used by the supervisor at the end of a run. The launcher is made the reaper of orphans, so that a descendant whose
parent died stays below the launcher and is found.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
from collections.abc import Collection, Iterable

import psutil

_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> bool:
    """Have orphaned descendants re-parented to this process (Linux). False where the system cannot do it."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        return bool(libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def find_descendants(job_pids: Collection[int], marker_key: str) -> list[psutil.Process]:
    """Living processes below this one that belong to a job.

    A process belongs to a job if it is one, runs in a job's session, has `marker_key` in its environment, or descends
    from such a process. Other children of the launcher (a metrics service, say) are left alone.
    """
    mine: set[int] = set(job_pids)
    found = []
    for process in psutil.Process().children(recursive=True):  # parents come before their children
        try:
            belongs = process.pid in mine or process.ppid() in mine or os.getsid(process.pid) in mine
            if not belongs:
                belongs = marker_key in process.environ()
            if not belongs:
                continue
            mine.add(process.pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
            continue
    return found


def send_signal(processes: Iterable[psutil.Process], signum: int) -> None:
    """Signal each process that still lives."""
    for process in processes:
        try:
            process.send_signal(signum)
        except psutil.NoSuchProcess:
            continue


def wait_gone(pids: Iterable[int], timeout_s: float) -> list[int]:
    """Block until all processes ended or the time is over; return those that still live. Does not poll (Linux)."""
    waiting: dict[int, int] = {}
    poller = select.poll()
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        waiting[pidfd] = pid
        poller.register(pidfd, select.POLLIN)
    deadline = time.monotonic() + timeout_s
    try:
        while waiting:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            for pidfd, _ in poller.poll(left_s * 1000):
                poller.unregister(pidfd)
                os.close(pidfd)
                del waiting[pidfd]
        return list(waiting.values())
    finally:
        for pidfd in waiting:
            os.close(pidfd)


def end_rest_of_job(pid: int, marker_key: str, name: str, kill_s: float = 3.0) -> None:
    """SIGKILL to what is left of a job whose first process `pid` has ended: its session, and whoever carries its name
    in the environment."""
    rest = []
    for process in psutil.Process().children(recursive=True):
        try:
            if os.getsid(process.pid) == pid or process.environ().get(marker_key) == name:
                rest.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
            continue
    send_signal(rest, signal.SIGKILL)
    wait_gone([process.pid for process in rest], kill_s)
    for process in rest:  # orphans are children of the launcher by now
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)


def end_all(job_pids: Collection[int], marker_key: str, grace_s: float, kill_s: float = 3.0) -> list[int]:
    """SIGTERM to every descendant, SIGKILL to those that live after `grace_s`; returns pids that survived even that.

    Takes at most about `grace_s + 2 * kill_s`.
    """
    send_signal(find_descendants(job_pids, marker_key), signal.SIGTERM)
    wait_gone([process.pid for process in find_descendants(job_pids, marker_key)], grace_s)
    for _ in range(2):  # twice: a process may have been forked while the list was made
        rest = find_descendants(job_pids, marker_key)
        if not rest:
            break
        send_signal(rest, signal.SIGKILL)
        wait_gone([process.pid for process in rest], kill_s)
    return [process.pid for process in find_descendants(job_pids, marker_key)]
