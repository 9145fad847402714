"""The main of a process in which foreign code runs, and the deadline that interrupts it there.

Called by `grader_process` and `game_process`. A single thread, so that a deadline can interrupt code that spins in
Python; code that blocks in an extension is killed by the pool a moment later.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator

_PR_SET_PDEATHSIG = 1
_REPEAT_S = 0.05  # code that swallows the interruption meets it again


class DeadlineReached(BaseException):
    """Raised inside foreign code. Not an `Exception`, so that `except Exception` does not stop it."""


def run_child(serve: Callable[[socket.socket], None]) -> int:
    """Limit this process, tie its life to its parent's, and serve the inherited socket until it is closed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the pool")
    parser.add_argument("--parent", type=int, required=True, help="process id of the pool")
    parser.add_argument("--memory-bytes", type=int, required=True)
    arguments = parser.parse_args()
    if sys.platform == "linux":
        _end_with_parent(arguments.parent)
    resource.setrlimit(resource.RLIMIT_AS, (arguments.memory_bytes, arguments.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, _interrupt)
    with socket.socket(fileno=arguments.fd) as connection:
        serve(connection)
    return 0


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise `DeadlineReached` in the code inside after `seconds`."""
    signal.setitimer(signal.ITIMER_REAL, seconds, _REPEAT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _interrupt(signum: int, stack: object) -> None:
    raise DeadlineReached


def _end_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)
