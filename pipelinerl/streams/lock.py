"""One writer per stream: an exclusive lock on a file beside the shards.

Called by the file writer. The kernel drops the lock when the process ends, however it ends, so a restart never finds
a stale one. Waits for nothing: a stream that is already being written is an error at once.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from pipelinerl.errors import StreamError

LOCK_NAME = "writer.lock"


class WriterLock:
    """Holds the lock from construction to `release`.

    Raises:
        StreamError: another writer, in this process or another, holds it.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK_NAME
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._fd)
            raise StreamError(
                f"{directory}: process {holder} is already writing this stream ({error.strerror}). "
                "Each stream has one writer: end the other process first, or use another output_dir"
            ) from error
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode("ascii"), 0)

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
