"""Blocks until a folder changes: how a file reader waits for the next record without polling.

Called by the file reader. Waits on inotify (Linux). Two cases need a bounded wait on top, since no event comes:
another machine wrote to a network file system (`RECHECK_S`), and there is no inotify at all (`FALLBACK_S`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
from pathlib import Path

logger = logging.getLogger(__name__)

RECHECK_S = 1.0
FALLBACK_S = 0.02
_READ_BYTES = 1 << 16


class DirectoryWatch:
    """Watches one folder from construction on: a change that comes after that is never missed.

    Look at the folder after constructing and after every `wait`.
    """

    def __init__(self, directory: Path, use_inotify: bool = True) -> None:
        self._notify_fd = _open_inotify(directory) if use_inotify else None
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._wake_fd, select.POLLIN)
        if self._notify_fd is not None:
            self._poll.register(self._notify_fd, select.POLLIN)

    def wait(self, timeout_s: float) -> bool:
        """Block until the folder may have changed, `wake` was called, or the time is over.

        Returns:
            True if `wake` was called.
        """
        bound_s = RECHECK_S if self._notify_fd is not None else FALLBACK_S
        woken = False
        # Rounded up: poll counts in whole milliseconds, and a wait of 0 would spin.
        for fd, _ in self._poll.poll(int(min(timeout_s, bound_s) * 1000) + 1):
            with contextlib.suppress(BlockingIOError):
                if fd == self._wake_fd:
                    os.eventfd_read(fd)
                    woken = True
                else:
                    os.read(fd, _READ_BYTES)
        return woken

    def wake(self) -> None:
        """End the present or the next `wait`. Thread-safe."""
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        os.close(self._wake_fd)
        if self._notify_fd is not None:
            os.close(self._notify_fd)


def _open_inotify(directory: Path) -> int | None:
    try:
        import inotify_simple
    except (ImportError, AttributeError, OSError) as error:
        logger.warning("no inotify on this system (%s): streams are checked every %g s", error, FALLBACK_S)
        return None
    notify = None
    try:
        notify = inotify_simple.INotify(nonblocking=True, closefd=False)
        mask = inotify_simple.flags.MODIFY | inotify_simple.flags.CREATE | inotify_simple.flags.MOVED_TO
        notify.add_watch(str(directory), mask)
    except OSError as error:
        if notify is not None:
            os.close(notify.fileno())
        logger.warning("inotify does not work for %s (%s): it is checked every %g s", directory, error, FALLBACK_S)
        return None
    return int(notify.fileno())
