"""Ends this process and its children when the launcher is gone, however it went.

Called by the role context at the start of every process. The launcher holds the write end of a pipe and writes
nothing; the kernel closes it when the launcher dies, even by SIGKILL. A daemon thread blocks in a read of the other
end until that end of file.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

DEFAULT_GRACE_S = 5.0

# The killer is a member of the group that ignores SIGTERM: while it lives, the id of the group cannot be taken by
# anyone else, and whoever ignores SIGTERM in the group ends with it. The line on stdout says that the trap is set.
_KILLER = "trap '' TERM; echo; sleep \"$1\"; kill -KILL 0"


def watch_death_pipe(fd: int, on_death: Callable[[], None] | None = None) -> threading.Thread:
    """Watch the read end `fd` and return the watching daemon thread.

    Args:
        fd: read end of the pipe whose write end only the launcher holds.
        on_death: called in the thread at end of file. Default: `end_own_process_group`.

    Raises:
        OSError: `fd` is not open.
    """
    os.fstat(fd)
    thread = threading.Thread(
        target=_watch, args=(fd, on_death or end_own_process_group), name="death-pipe", daemon=True
    )
    thread.start()
    return thread


def end_own_process_group(grace_s: float = DEFAULT_GRACE_S) -> None:
    """SIGTERM this process's group, itself included, and SIGKILL what is left of it after `grace_s` seconds.

    The second signal comes from a helper process, because this one may be gone by then.
    """
    group = os.getpgrp()
    try:
        killer = subprocess.Popen(
            ["/bin/sh", "-c", _KILLER, "sh", f"{grace_s:g}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.defpath},
        )
        assert killer.stdout is not None
        armed = killer.stdout.readline() != b""
    except OSError as error:
        logger.error("no helper to end the process group: %s", error)
        armed = False
    os.killpg(group, signal.SIGTERM if armed else signal.SIGKILL)


def _watch(fd: int, on_death: Callable[[], None]) -> None:
    while True:
        try:
            if os.read(fd, 64) == b"":
                break
        except OSError as error:
            # A pipe that cannot be read can never report the launcher's death either.
            logger.error("the death pipe cannot be read: %s", error)
            break
    logger.error("the launcher is gone: ending this process and its children")
    on_death()
