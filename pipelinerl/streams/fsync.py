"""When written bytes are forced to the disk: `never`, at an `interval`, or `always`.

Called by the file writer. Bytes that a process handed to the kernel survive the death of that process under every
policy; the policy is about the death of the machine. The interval's thread waits on a condition until there is
something to sync.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Literal

logger = logging.getLogger(__name__)

FsyncPolicy = Literal["never", "interval", "always"]
DEFAULT_INTERVAL_S = 1.0


class Syncer:
    """Syncs one file descriptor at a time according to the policy. `write`, `sync` and `replace` run in the writer's
    thread and under its lock; an error in the interval's thread is raised by the next of them."""

    def __init__(self, policy: FsyncPolicy, interval_s: float = DEFAULT_INTERVAL_S) -> None:
        self.policy = policy
        self._interval_s = interval_s
        self._condition = threading.Condition()
        self._fd = -1
        self._dirty = False
        self._closed = False
        self._error: OSError | None = None
        self._thread: threading.Thread | None = None
        if policy == "interval":
            self._thread = threading.Thread(target=self._run, name="stream-fsync", daemon=True)
            self._thread.start()

    def wrote(self) -> None:
        """Call after each write."""
        if self.policy == "always":
            os.fdatasync(self._fd)
        elif self.policy == "interval":
            with self._condition:
                self._raise_error()
                self._dirty = True
                self._condition.notify()

    def sync(self) -> None:
        """Force everything written so far to the disk, unless the policy is `never`."""
        if self.policy == "never" or self._fd < 0:
            return
        with self._condition:
            self._raise_error()
            self._dirty = False
            os.fdatasync(self._fd)

    def replace(self, fd: int) -> None:
        """Go on with another file; the one before is synced first."""
        self.sync()
        with self._condition:
            self._fd = fd

    def close(self) -> None:
        """Sync a last time and end the thread. The file descriptor stays open."""
        try:
            self.sync()
        finally:
            with self._condition:
                self._closed = True
                self._fd = -1
                self._condition.notify()
            if self._thread is not None:
                self._thread.join()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        last_sync = time.monotonic()
        with self._condition:
            while not self._closed:
                self._condition.wait_for(lambda: self._dirty or self._closed)
                rest = last_sync + self._interval_s - time.monotonic()
                if rest > 0:
                    self._condition.wait_for(lambda: self._closed, timeout=rest)
                if self._dirty and not self._closed:
                    self._dirty = False
                    try:
                        os.fdatasync(self._fd)
                    except OSError as error:
                        logger.error("fsync failed: %s", error)
                        self._error = error
                        return
                    last_sync = time.monotonic()
