"""Reads the records of one stream from its shards, in order, and waits for new ones.

Called through `StreamHub.reader`. Waits for a change of the stream's folder, up to the caller's time-out.
Only whole lines are taken: the bytes of an unfinished last line are read again once there is more, because a
restarted writer may have cut them off and written something else in their place.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from pipelinerl.errors import StreamError
from pipelinerl.records.codec import RecordCodec
from pipelinerl.streams.base import Entry
from pipelinerl.streams.index import seek
from pipelinerl.streams.layout import list_shards, shard_of, shard_path
from pipelinerl.streams.waiting import DirectoryWatch

T = TypeVar("T")

# Both are small for the sake of the processor's caches. One read returns about BATCH_BYTES at most: large records,
# decoded by the hundred, would have been pushed out again before anybody looks at them.
CHUNK_BYTES = 1 << 18
BATCH_BYTES = 1 << 16


class FileReader(Generic[T]):
    """Reader of `directory` (one partition of one stream) from `offset` on. The stream need not exist yet.

    Args:
        directory: folder of the shards; created if absent, because a folder is what can be watched.
        record_type: struct, or union of structs, that the stream holds.
        offset: first record to return. It may lie in the future.
        use_inotify: False takes the bounded wait, for tests.

    Raises:
        StreamError: the folder cannot be created.
    """

    def __init__(self, directory: Path, record_type: Any, offset: int = 0, use_inotify: bool = True) -> None:
        if offset < 0:
            raise StreamError(f"stream {directory}: cannot read from offset {offset}, offsets count from 0")
        self._directory = directory
        self._codec = RecordCodec[T](record_type)
        self._wanted = offset
        self._next = 0
        self._shard = 0
        self._fd = -1
        self._position = 0
        self._lines: deque[bytes] = deque()
        self._watch: DirectoryWatch | None = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._watch = DirectoryWatch(directory, use_inotify)
        except OSError as error:
            raise StreamError(f"stream {directory}: cannot be opened for reading: {error}") from error

    @property
    def offset(self) -> int:
        """Offset of the record that will be returned next."""
        return max(self._next, self._wanted)

    def read(self, timeout_s: float, max_records: int = 256) -> Sequence[Entry[T]]:
        """Return 1..max_records entries in order, or none after `timeout_s` or `wake`.

        Raises:
            StreamError: the next record is corrupt or gone, with file, offset and reason; the records before it have
                been returned, and every further call raises again.
        """
        if self._watch is None:
            raise self._error(self.offset, "the reader is closed")
        deadline = time.monotonic() + timeout_s
        while True:
            entries = self._take(max_records)
            rest = deadline - time.monotonic()
            if entries or rest <= 0:
                return entries
            self._check_gap()
            if self._watch.wait(rest):
                return self._take(max_records)

    def wake(self) -> None:
        if (watch := self._watch) is not None:
            watch.wake()

    def close(self) -> None:
        """Free the file and the watch. May be called twice."""
        self._lines.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._watch is not None:
            watch, self._watch = self._watch, None
            watch.close()

    def _take(self, max_records: int) -> list[Entry[T]]:
        entries: list[Entry[T]] = []
        taken_bytes = 0
        while len(entries) < max_records and taken_bytes < BATCH_BYTES:
            if not self._lines and not self._fill():
                break
            line = self._lines[0]
            if self._next >= self._wanted:
                try:
                    record = self._codec.decode(line)
                except StreamError as error:
                    if entries:
                        break
                    if self._changed_on_disk(line):
                        self._lines.clear()
                        continue
                    raise self._error(self._next, str(error)) from error
                entries.append(Entry(self._next, record))
                taken_bytes += len(line)
            self._lines.popleft()
            self._position += len(line) + 1
            self._next += 1
        return entries

    def _fill(self) -> bool:
        """Load whole lines from the present shard, or from the one after it. False: there is none yet."""
        if self._fd < 0 and not self._open_first_shard():
            return False
        if self._load_lines():
            return True
        # A shard is named after its first record, so once all before that record were read, the old one is done.
        if self._next == self._shard or not shard_path(self._directory, self._next).exists():
            return False
        self._open_shard(self._next)
        return self._load_lines()

    def _load_lines(self) -> bool:
        size = CHUNK_BYTES
        while True:
            data = os.pread(self._fd, size, self._position)
            end = data.rfind(b"\n")
            if end >= 0:
                self._lines.extend(data[:end].split(b"\n"))
                return True
            if len(data) < size:
                if not data and os.fstat(self._fd).st_size < self._position:
                    raise self._error(self._next, "the shard has become shorter than what was read from it")
                return False
            size *= 4

    def _open_first_shard(self) -> bool:
        shards = list_shards(self._directory)
        if not shards:
            return False
        first = shard_of(shards, self._wanted)
        if first is None:
            raise self._error(
                self._wanted, f"the record was removed; the oldest one left is {shards[0]}. Read from there"
            )
        self._open_shard(first)
        return True

    def _open_shard(self, first: int) -> None:
        try:
            fd = os.open(shard_path(self._directory, first), os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._error(first, f"cannot be read: {error}") from error
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd
        self._shard = first
        records, self._position = seek(shard_path(self._directory, first), fd, max(0, self._wanted - first))
        self._next = first + records

    def _check_gap(self) -> None:
        """A shard that starts behind the next record means that records in between are gone, if they do not show."""
        later = [first for first in list_shards(self._directory) if first > self._next]
        if later and self._fd >= 0 and not self._fill():
            raise self._error(self._next, f"the record is missing, but the shard of offset {later[0]} exists")

    def _changed_on_disk(self, line: bytes) -> bool:
        """A writer that repairs a torn tail while we read can show a mix of old and new bytes once."""
        return os.pread(self._fd, len(line) + 1, self._position) != line + b"\n"

    def _error(self, offset: int, reason: str) -> StreamError:
        where = f"{shard_path(self._directory, self._shard)} at byte {self._position}"
        return StreamError(f"stream {where}, offset {offset}: {reason}")
