"""Appends records to one Redis stream.

Called through `StreamHub.writer`. Waits for the server's answer. Offset n has the explicit id `n+1`-0 (Redis has no
id 0-0), and a counter beside the log says how many records were written. A script compares the counter first, so a
write that is repeated after a lost connection is one write, and a server that came back without its last records is
noticed: they are sent again from memory, or the error says which are lost. Where the stream has a budget, a record
that does not fit waits for room: that is the back-pressure on whoever writes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, Generic, TypeVar

import redis

from pipelinerl.errors import StreamError
from pipelinerl.records.codec import RecordCodec
from pipelinerl.streams.fsync import FsyncPolicy
from pipelinerl.streams.lock import WriterLock
from pipelinerl.streams.redis_budget import FIELD, OVERHEAD_BYTES, Archive, Budget, Mover
from pipelinerl.streams.redis_client import StreamKeys

T = TypeVar("T")

logger = logging.getLogger(__name__)

# What a server with `appendfsync everysec` may have lost after a crash is at most about two seconds old.
TAIL_S = 5.0
TAIL_BYTES = 64 * 2**20
AOF_TIMEOUT_MS = 5_000

_CONFLICT, _FULL = -1, -2
# ARGV: number of the record, field, bytes, limit (0: none), overhead. A log of one entry takes one more of any size.
_APPEND = """
local count = tonumber(redis.call('GET', KEYS[2]) or '0')
local number = tonumber(ARGV[1])
local id = ARGV[1] .. '-0'
if count == number - 1 then
  local size = #ARGV[3] + tonumber(ARGV[5])
  local limit = tonumber(ARGV[4])
  if limit > 0 and tonumber(redis.call('GET', KEYS[3]) or '0') + size > limit
    and redis.call('XLEN', KEYS[1]) > 1 then return -2 end
  redis.call('XADD', KEYS[1], id, ARGV[2], ARGV[3])
  redis.call('SET', KEYS[2], ARGV[1])
  redis.call('INCRBY', KEYS[3], size)
  return number
end
if count < number then return count end
local found = redis.call('XRANGE', KEYS[1], id, id)[1]
if found and found[2][2] == ARGV[3] then return number end
return -1
"""


class RedisWriter(Generic[T]):
    """Writer of one stream; goes on behind its last record.

    Args:
        client: connection of this writer alone; closed with it.
        keys: of the stream.
        record_type: struct, or union of structs, that the stream holds.
        lock_dir: folder of the run for the lock of this stream; the kernel drops it when the process ends.
        fsync: `flush` waits for the server's append-only file unless `never`; `always`: every write does.
        budget, archive: how much the stream may hold, and where records go that must make room; None: no limit.

    Raises:
        StreamError: the stream has a writer already, the server does not answer, or it has lost records.
    """

    def __init__(
        self,
        client: redis.Redis,
        keys: StreamKeys,
        record_type: Any,
        lock_dir: Path,
        fsync: FsyncPolicy,
        budget: Budget | None = None,
        archive: Archive | None = None,
    ) -> None:
        self._client, self._keys, self._fsync = client, keys, fsync
        self._codec = RecordCodec[T](record_type, packed=True)
        self._mutex = threading.Lock()
        self._tail: deque[tuple[int, float, bytes]] = deque()
        self._tail_bytes = 0
        self._unusable: str | None = None
        self._warned = False
        self._waits_no_more = threading.Event()
        self._archive = archive
        self._mover: Mover | None = None
        if budget is not None and archive is not None:
            self._mover = Mover(client, keys, self._codec, archive, budget)
        try:
            lock_dir.mkdir(parents=True, exist_ok=True)
            self._lock = WriterLock(lock_dir)
        except OSError as error:
            raise self._error(f"cannot be locked: {error}") from error
        try:
            self._append = client.register_script(_APPEND)
            self._next = int(client.get(keys.written) or 0)
            self._expect_archived()
        except redis.RedisError as error:
            self.close()
            raise self._error(f"cannot be opened for writing: {error}") from error
        except StreamError:
            self.close()
            raise

    @property
    def next_offset(self) -> int:
        """Offset that the next record will get."""
        return self._next

    def write(self, record: T) -> int:
        """Append one record, once there is room for it, and return its offset.

        Raises:
            StreamError: the record cannot be encoded (the stream stays usable), or the server refused it, is gone, or
                lost records that are no longer in memory, or there was no room for too long.
            NoRoom: there is none, and `end_waits` was called.
        """
        data = self._codec.encode(record)
        with self._mutex:
            self._check_usable()
            number = self._next + 1
            try:
                while (count := self._send(number, data, self._limit)) != number:
                    if count == _FULL:
                        self._make_room()
                    else:
                        self._resend(count)
            except redis.RedisError as error:
                raise self._error(f"offset {self._next} cannot be written: {error}") from error
            self._remember(number, data)
            self._next = number
            if self._fsync == "always":
                self._wait_for_disk()
            return number - 1

    def flush(self) -> None:
        """Wait until the server has all records on its disk, unless the policy is `never`."""
        with self._mutex:
            self._check_usable()
            if self._fsync != "never":
                self._wait_for_disk()

    def end_waits(self) -> None:
        """Let a write that waits for room, and every later one without room, fail with NoRoom. Thread-safe."""
        self._waits_no_more.set()

    def close(self) -> None:
        """Release the stream to another writer. May be called twice. Ends a write that waits for room."""
        self.end_waits()
        with self._mutex:
            self._unusable = self._unusable or "is closed"
            self._client.close()
            if self._archive is not None:
                self._archive.close()
            self._lock.release()

    @property
    def _limit(self) -> int:
        return 0 if self._mover is None else self._mover.budget.limit_bytes

    def _make_room(self) -> None:
        if self._mover is None:
            return
        try:
            self._mover.make_room(self._next, self._waits_no_more.is_set)
        except StreamError as error:
            message = f"stream {self._keys.log}: offset {self._next} cannot be written: the stream {error}"
            raise type(error)(message) from error

    def _expect_archived(self) -> None:
        """Notice a server that came back empty, or with less than has been moved out of it."""
        if self._archive is None or not self._archive.exists:
            return
        if (archived := self._archive.open().next_offset) > self._next:
            raise self._error(
                f"the server has {self._next} records, but {archived} have been there: those behind the archive "
                "are lost, and the run cannot go on. Restore the server's append-only file, or start a new run"
            )

    def _send(self, number: int, data: bytes, limit: int = 0) -> int:
        keys = [self._keys.log, self._keys.written, self._keys.size]
        count = int(self._append(keys=keys, args=[number, FIELD, data, limit, OVERHEAD_BYTES]))
        if count == _CONFLICT:
            self._unusable = f"holds another record at offset {number - 1}: a second writer was at work"
            raise self._error(self._unusable)
        return count

    def _send_exactly(self, number: int, data: bytes) -> None:
        count = self._send(number, data)
        if count != number:
            raise self._error(f"has {count} records where {number} were expected")

    def _resend(self, count: int) -> None:
        """The server has only `count` records: send those behind them once more."""
        rest = [(number, data) for number, _, data in self._tail if number > count]
        if len(rest) != self._next - count:
            self._unusable = f"lost the records of offsets {count}..{self._next - 1} when the server was restarted"
            raise self._error(self._unusable)
        logger.warning("%s came back without its last %d records; sending them again", self._keys.log, len(rest))
        for number, data in rest:
            self._send_exactly(number, data)

    def _remember(self, number: int, data: bytes) -> None:
        now = time.monotonic()
        self._tail.append((number, now, data))
        self._tail_bytes += len(data)
        while self._tail[0][1] < now - TAIL_S or (self._tail_bytes > TAIL_BYTES and len(self._tail) > 1):
            self._tail_bytes -= len(self._tail.popleft()[2])

    def _wait_for_disk(self) -> None:
        try:
            client: Any = self._client
            synced = client.execute_command("WAITAOF", 1, 0, AOF_TIMEOUT_MS)
        except redis.ResponseError as error:
            # An older server, or one without an append-only file: durability is then its owner's choice.
            if not self._warned:
                self._warned = True
                logger.warning("%s: the server cannot confirm that records are on its disk: %s", self._keys.log, error)
            return
        except redis.RedisError as error:
            raise self._error(f"cannot be flushed: {error}") from error
        if synced[0] < 1:
            raise self._error(f"the server did not write its records to the disk within {AOF_TIMEOUT_MS} ms")

    def _check_usable(self) -> None:
        if self._unusable is not None:
            raise self._error(self._unusable)

    def _error(self, reason: str) -> StreamError:
        return StreamError(f"stream {self._keys.log}: {reason}")
