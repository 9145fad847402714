"""Streams in files: one JSON line per record (see `shards` for the layout).

A record is one `write` call, so readers see all of it once `write` returns. A crash inside the call leaves a torn last
line: readers wait for its end, and the next writer cuts it off. Readers watch the folder for changes.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from pipelinerl.config.resources import StreamsConfig
from pipelinerl.errors import StreamError
from pipelinerl.records.codec import RecordCodec
from pipelinerl.rundir.durable import FsyncPolicy, Syncer, sync_path
from pipelinerl.streams.base import Entry, LockedWriter, StreamBackend, StreamReader, StreamSpec, StreamWriter
from pipelinerl.streams.shards import (
    commit,
    list_shards,
    lost_shard,
    note_newest,
    repair_shard,
    shard_of,
    shard_path,
    stream_dir,
    strip_old_shards,
)
from pipelinerl.streams.waiting import DirectoryWatch

T = TypeVar("T")

# Both are small, so that decoded records are used while they are in the processor's caches.
CHUNK_BYTES = 1 << 18
BATCH_BYTES = 1 << 16
#: Distance of the places in a shard that are remembered, for whoever reads a record again.
MARK_BYTES = 1 << 20
#: How often a writer looks whether its shard is still there.
LOOK_S = 1.0
_RESTORE = "Restore the file, or start a new run in another output_dir"


class FileBackend(StreamBackend):
    """Needs neither `run_id` nor `environ`: every run has its own folder."""

    is_on_disk: ClassVar[bool] = True

    def __init__(self, config: StreamsConfig, root: Path, run_id: str, environ: Mapping[str, str]) -> None:
        self._config = config
        self._root = root
        self._marks = Marks()
        self.may_wait = config.fsync != "never"

    def writer(self, spec: StreamSpec, record_type: Any, consumers: Sequence[str]) -> StreamWriter[Any]:
        config = self._config
        folder = stream_dir(self._root, spec)
        return FileWriter[Any](folder, record_type, config.shard_bytes, config.fsync, config.retention == "all")

    def reader(self, spec: StreamSpec, record_type: Any, offset: int, consumer: str | None) -> StreamReader[Any]:
        return FileReader[Any](stream_dir(self._root, spec), record_type, offset, self._marks)

    def places(self, spec: StreamSpec) -> list[int]:
        return list_shards(stream_dir(self._root, spec))

    def commit(self, spec: StreamSpec, offset: int) -> None:
        commit(stream_dir(self._root, spec), offset)


class FileWriter(LockedWriter[T]):
    """Writer of a stream in `directory`; creates it and continues after its last record.

    Args:
        directory: folder of the shards.
        record_type: struct, or union of structs, that the stream holds.
        shard_bytes: a shard ends before the record that would make it larger (one record always fits).
        fsync: `never`, `interval` (about once a second) or `always` (before `write` returns).
        keep_tokens: False: starting a shard removes the tokens from shards that no resume needs.

    Raises:
        StreamError: the stream has a writer already, its newest shard is gone, or the folder cannot be written.
    """

    def __init__(
        self, directory: Path, record_type: Any, shard_bytes: int, fsync: FsyncPolicy, keep_tokens: bool = True
    ) -> None:
        super().__init__(str(directory), directory, record_type)
        self._shard_bytes = shard_bytes
        self._keep_tokens = keep_tokens
        self._stripper: threading.Thread | None = None
        self._fd = -1
        self._shard = self._size = 0
        self._looked_at = 0.0
        # A shard could not be started: the next write tries again, even if its record fits into the one before.
        self._is_shard_due = False
        self._syncer = Syncer(fsync)
        with self._opening(OSError):
            self._open_last_shard()

    def write(self, record: T) -> int:
        """Append one record and return its offset.

        Raises:
            StreamError: the record cannot be encoded (the stream stays usable), the disk refused it, or the shard was
                deleted meanwhile.
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
            try:
                try:
                    if self._broken is None:
                        self._broken = "is closed"
                        self._look(self._looked_at + LOOK_S)
                finally:
                    self._syncer.close()
            except OSError as error:
                raise self._error(f"cannot be flushed: {error}") from error
            finally:
                if self._fd >= 0:
                    os.close(self._fd)
                    self._fd = -1
                super().close()

    def _open_last_shard(self) -> None:
        if (lost := lost_shard(self._directory)) is not None:
            raise self._error(f"its newest file, {shard_path(self._directory, lost).name}, is gone. {_RESTORE}")
        shards = list_shards(self._directory)
        first = shards[-1] if shards else 0
        path = shard_path(self._directory, first)
        records, self._size = repair_shard(path) if shards else (0, 0)
        self._next = first + records
        self._open(first)

    def _start_shard(self) -> None:
        self._is_shard_due = True
        self._open(self._next)
        self._size, self._is_shard_due = 0, False
        if not self._keep_tokens and (self._stripper is None or not self._stripper.is_alive()):
            self._stripper = threading.Thread(
                target=strip_old_shards, args=(self._directory,), name="stream-retention", daemon=True
            )
            self._stripper.start()

    def _open(self, first: int) -> None:
        """Continue in the shard of offset `first`; after an error the current one stays in use."""
        fd = os.open(shard_path(self._directory, first), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            if self._syncer.policy != "never":
                sync_path(self._directory)
            note_newest(self._directory, first)
            self._syncer.replace(fd)
        except OSError:
            os.close(fd)
            raise
        old, self._fd, self._shard = self._fd, fd, first
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
        super()._check_usable()
        self._look(time.monotonic())

    def _look(self, now: float) -> None:
        """Once in a while: a deleted file accepts records that nobody will find."""
        if now < self._looked_at + LOOK_S or self._fd < 0:
            return
        self._looked_at = now
        if not os.access(path := shard_path(self._directory, self._shard), os.F_OK):
            self._broken = f"{path.name} was deleted while it was written. Its records are lost: start a new run"
            raise self._error(self._broken)


class Marks:
    """Where records begin in shards that were read before, so that a record is found again without reading its shard
    from the start. Thread-safe. A rewritten shard is another file, without marks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of_file: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def note(self, fd: int, offset: int, position: int) -> None:
        """Record `offset` begins at byte `position`."""
        with self._lock:
            marks = self._of_file.setdefault(_file_id(fd), [])
            before, after = self._around(marks, offset)
            if position - before[1] >= MARK_BYTES and (after is None or after[1] - position >= MARK_BYTES):
                insort(marks, (offset, position))

    def before(self, fd: int, offset: int) -> tuple[int, int]:
        """The last (offset, position) that is known up to record `offset`; (0, 0): none is."""
        with self._lock:
            return self._around(self._of_file.get(_file_id(fd), []), offset)[0]

    @staticmethod
    def _around(marks: list[tuple[int, int]], offset: int) -> tuple[tuple[int, int], tuple[int, int] | None]:
        index = bisect_right(marks, offset, key=lambda mark: mark[0])
        return marks[index - 1] if index else (0, 0), marks[index] if index < len(marks) else None


def _file_id(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


class FileReader(Generic[T]):
    """Reader of the stream in `directory` from `offset` on. The stream need not exist yet.

    Args:
        directory: folder of the shards.
        record_type: struct, or union of structs, that the stream holds.
        offset: first record to return. It may lie in the future.
        marks: shared by readers that may read the same records.
    """

    def __init__(self, directory: Path, record_type: Any, offset: int = 0, marks: Marks | None = None) -> None:
        self._directory = directory
        self._codec = RecordCodec[T](record_type)
        self._wanted = offset
        self._marks = marks or Marks()
        self._marked = 0
        self._next = 0
        self._shard = 0
        self._fd = -1
        self._position = 0
        self._lines: deque[bytes] = deque()
        self._watch: DirectoryWatch | None = DirectoryWatch(directory)

    @property
    def offset(self) -> int:
        """Offset of the record that will be returned next."""
        return max(self._next, self._wanted)

    def read(self, timeout_s: float, max_records: int = 256) -> Sequence[Entry[T]]:
        """See `StreamReader.read`."""
        if self._watch is None:
            raise self._error(self.offset, "the reader is closed")
        deadline = time.monotonic() + timeout_s
        while not (entries := self._take(max_records)):
            rest = deadline - time.monotonic()
            if rest <= 0:
                self._check_gap()
                break
            if self._watch.wait(rest):
                return self._take(max_records)
        return entries

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
                if self._position - self._marked >= MARK_BYTES:
                    self._marks.note(self._fd, self._next, self._position)
                    self._marked = self._position
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
        self._shard = self._next = first
        self._position = 0
        if self._wanted > first:
            offset, position = self._marks.before(fd, self._wanted)
            if position:
                self._next, self._position = offset, position
        self._marked = self._position

    def _check_gap(self) -> None:
        """A shard that starts after the next record means that the records in between are gone, if none shows up."""
        if (lost := lost_shard(self._directory)) is not None and not self._fill():
            name = shard_path(self._directory, lost).name
            raise self._error(self.offset, f"the newest file, {name}, is gone. {_RESTORE}")
        later = [first for first in list_shards(self._directory) if first > self._next]
        if later and self._fd >= 0 and not self._fill():
            raise self._error(self._next, f"the record is missing, but the shard of offset {later[0]} exists")

    def _changed_on_disk(self, line: bytes) -> bool:
        """A writer that repairs a torn tail while we read can show a mix of old and new bytes once."""
        return os.pread(self._fd, len(line) + 1, self._position) != line + b"\n"

    def _error(self, offset: int, reason: str) -> StreamError:
        where = f"{shard_path(self._directory, self._shard)} at byte {self._position}"
        return StreamError(f"stream {where}, offset {offset}: {reason}")
