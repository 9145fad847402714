"""Blocks until a folder changes, so that file readers wait for the next record without polling.

Waits on inotify. Writes of another machine to a network file system cause no event, so a wait is bounded by
`RECHECK_S`; without inotify (its instances are limited) by `FALLBACK_S`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
from pathlib import Path

from inotify_simple import INotify, flags

logger = logging.getLogger(__name__)

RECHECK_S = 1.0
FALLBACK_S = 0.02
_CHANGES = flags.MODIFY | flags.CREATE | flags.MOVED_TO


class DirectoryWatch:
    """Watches one folder, which is created if needed. Look at the folder after every `wait`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._wake_fd, select.POLLIN)
        self._notify: INotify | None = None
        self._bound_s = 0.0

    def wait(self, timeout_s: float) -> bool:
        """Block until the folder may have changed, `wake` was called, or the time is over; return whether it was
        `wake`.

        The first call returns at once; changes after it are not missed.
        """
        timeout_ms = int(min(timeout_s, self._bound_s) * 1000) + 1  # rounded up: a wait of 0 would spin
        if not self._bound_s:
            self._start()
            timeout_ms = 0
        woken = False
        for fd, _ in self._poll.poll(timeout_ms):
            with contextlib.suppress(BlockingIOError):
                if fd == self._wake_fd:
                    os.eventfd_read(fd)
                    woken = True
                else:
                    os.read(fd, 1 << 16)
        return woken

    def wake(self) -> None:
        """End the current or the next `wait`. Thread-safe."""
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        os.close(self._wake_fd)
        if self._notify is not None:
            self._notify.close()

    def _start(self) -> None:
        self._bound_s = RECHECK_S
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._notify = INotify(nonblocking=True)
            self._notify.add_watch(str(self._directory), _CHANGES)
            self._poll.register(self._notify.fileno(), select.POLLIN)
        except OSError as error:
            self._bound_s = FALLBACK_S
            logger.warning("%s cannot be watched (%s): it is checked every %g s", self._directory, error, FALLBACK_S)
