"""Appends records to the shards of one stream.

Called through `StreamHub.writer`. Waits for nothing but the disk. A record is one `write` call of one line, so a
reader sees it whole as soon as `write` returns; a crash inside the call leaves a torn last line, which readers wait
on and the next writer cuts off.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, Generic, TypeVar

from pipelinerl.errors import StreamError
from pipelinerl.records.codec import RecordCodec
from pipelinerl.streams.fsync import FsyncPolicy, Syncer
from pipelinerl.streams.index import IndexWriter
from pipelinerl.streams.layout import list_shards, shard_path
from pipelinerl.streams.lock import WriterLock
from pipelinerl.streams.repair import repair_shard
from pipelinerl.streams.retention import strip_old_shards

T = TypeVar("T")


class FileWriter(Generic[T]):
    """Writer of `directory` (one partition of one stream); creates it and goes on behind its last record.

    Args:
        directory: folder of the shards.
        record_type: struct, or union of structs, that the stream holds.
        shard_bytes: a shard is closed before the record that would make it larger (one record always fits).
        fsync: `never`, `interval` (about once a second) or `always` (before `write` returns).
        keep_tokens: False takes the tokens out of shards that no resume needs, whenever a new shard is begun.

    Raises:
        StreamError: the stream has a writer already, or the folder cannot be written.
    """

    def __init__(
        self, directory: Path, record_type: Any, shard_bytes: int, fsync: FsyncPolicy, keep_tokens: bool = True
    ) -> None:
        self._directory = directory
        self._codec = RecordCodec[T](record_type)
        self._shard_bytes = shard_bytes
        self._keep_tokens = keep_tokens
        self._stripper: threading.Thread | None = None
        self._mutex = threading.Lock()
        self._fd = -1
        self._first = self._next = self._size = 0
        # A shard could not be begun: the next write tries again, even if its record fits into the one before.
        self._is_shard_due = False
        self._broken: str | None = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = WriterLock(directory)
        except OSError as error:
            raise self._error(f"cannot be opened for writing: {error}") from error
        self._syncer = Syncer(fsync)
        try:
            self._open_last_shard()
        except OSError as error:
            self.close()
            raise self._error(f"cannot be opened for writing: {error}") from error

    @property
    def next_offset(self) -> int:
        """Offset that the next record will get."""
        return self._next

    def write(self, record: T) -> int:
        """Append one record and return its offset.

        Raises:
            StreamError: the record cannot be encoded (the stream stays usable), or the disk refused it.
        """
        line = self._codec.encode(record) + b"\n"
        with self._mutex:
            self._check_usable()
            try:
                if self._size and (self._is_shard_due or self._size + len(line) > self._shard_bytes):
                    self._start_shard()
                self._append(line)
            except OSError as error:
                raise self._error(f"offset {self._next} cannot be written: {error}") from error
            offset, self._next, self._size = self._next, self._next + 1, self._size + len(line)
            try:
                self._index.wrote(self._next - self._first, self._size)
                self._syncer.wrote()
            except OSError as error:
                # After a failed fsync nobody knows which pages reached the disk, so nothing may follow.
                self._broken = f"cannot be forced to the disk: {error}"
                raise self._error(self._broken) from error
            return offset

    def flush(self) -> None:
        """Force all records to the disk, unless the policy is `never`."""
        with self._mutex:
            self._check_usable()
            try:
                self._syncer.sync()
            except OSError as error:
                raise self._error(f"cannot be flushed: {error}") from error

    def end_waits(self) -> None:
        """Files are never full: nothing waits for a reader."""

    def close(self) -> None:
        """Sync (by the policy) and release the stream to another writer. May be called twice."""
        if self._stripper is not None:
            self._stripper.join()
        with self._mutex:
            if self._broken is None:
                self._broken = "is closed"
            try:
                self._syncer.close()
            except OSError as error:
                raise self._error(f"cannot be flushed: {error}") from error
            finally:
                if self._fd >= 0:
                    os.close(self._fd)
                    self._fd = -1
                self._lock.release()

    def _open_last_shard(self) -> None:
        shards = list_shards(self._directory)
        self._first = shards[-1] if shards else 0
        path = shard_path(self._directory, self._first)
        records, self._size = repair_shard(path) if shards else (0, 0)
        self._next = self._first + records
        self._open(path, self._size)

    def _start_shard(self) -> None:
        self._is_shard_due = True
        self._open(shard_path(self._directory, self._next), 0)
        self._first, self._size, self._is_shard_due = self._next, 0, False
        if not self._keep_tokens and (self._stripper is None or not self._stripper.is_alive()):
            self._stripper = threading.Thread(
                target=strip_old_shards, args=(self._directory,), name="stream-retention", daemon=True
            )
            self._stripper.start()

    def _open(self, path: Path, size: int) -> None:
        """Go on in the shard at `path`, which has `size` bytes; after an error the one before is still in use."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            index = IndexWriter(path, fd, size)
            if self._syncer.policy != "never":
                _sync_directory(self._directory)
            self._syncer.replace(fd)
        except OSError:
            os.close(fd)
            raise
        old, self._fd, self._index = self._fd, fd, index
        if old >= 0:
            os.close(old)

    def _append(self, line: bytes) -> None:
        """Write the whole line or none of it."""
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            # Half a line must not stay in front of the next record.
            try:
                os.ftruncate(self._fd, self._size)
            except OSError as error:
                self._broken = f"holds half a record at offset {self._next} ({error})"
            raise

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise self._error(self._broken)

    def _error(self, reason: str) -> StreamError:
        return StreamError(f"stream {self._directory}: {reason}")


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
