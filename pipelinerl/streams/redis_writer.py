"""Appends records to one Redis stream, within a budget of bytes.

Offset n has the explicit id `n+1`-0 (Redis has no id 0-0), and a counter holds the number of records. A script checks
the counter first, so a write that is repeated after a lost connection counts once, and a restarted server that lost its
last records is noticed: they are sent again from memory, or the error names the lost ones.

A record that does not fit into the budget waits until the stream's consumers have read older ones. Those move to the
archive, file shards with the same offsets in the run directory, where any reader finds them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pipelinerl.config.resources import RedisStreams
from pipelinerl.errors import NoRoom
from pipelinerl.streams.base import LockedWriter, StreamSpec
from pipelinerl.streams.files import FileWriter
from pipelinerl.streams.redis_server import Client, RedisError, ResponseError
from pipelinerl.streams.shards import list_shards

T = TypeVar("T")
logger = logging.getLogger(__name__)

ARCHIVE_FOLDER = "archive"
FIELD = b"r"
# Memory that Redis needs per entry besides its bytes.
OVERHEAD_BYTES = 128
MOVE_BYTES = 32 * 2**20
MOVE_ENTRIES = 64
# How often a writer of a full stream checks for room.
ROOM_POLL_S = 0.05
# A server with `appendfsync everysec` loses at most about two seconds in a crash.
TAIL_S = 5.0
TAIL_BYTES = 64 * 2**20
AOF_TIMEOUT_MS = 5_000

_RESTORE = "Restore the server's append-only file, or start a new run in another output_dir"
_CONFLICT, _FULL = -1, -2
_NO_LIMIT = 2**53
# ARGV: number of the record, field, bytes, limit, overhead. A log with one entry accepts one more of any size.
_APPEND = """
local count = tonumber(redis.call('GET', KEYS[2]) or '0')
local number = tonumber(ARGV[1])
local id = ARGV[1] .. '-0'
if count == number - 1 then
  local size = #ARGV[3] + tonumber(ARGV[5])
  if tonumber(redis.call('GET', KEYS[3]) or '0') + size > tonumber(ARGV[4])
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
# Removes the entries below an id and subtracts their bytes; a repeated call finds none and subtracts nothing.
_TRIM = """
if redis.call('XTRIM', KEYS[1], 'MINID', '=', ARGV[1]) == 0 then return 0 end
local left = tonumber(redis.call('GET', KEYS[2]) or '0') - tonumber(ARGV[2])
redis.call('SET', KEYS[2], string.format('%d', math.max(left, 0)))
return 1
"""


class Keys(NamedTuple):
    """Keys of one stream: the log, the number of records ever written, the bytes in the log, and a hash with the next
    offset of each consumer."""

    log: str
    written: str
    size: str
    consumed: str


def stream_keys(run_id: str, spec: StreamSpec) -> Keys:
    """The run id separates runs on one server; the braces keep the keys of a stream on one node of a cluster."""
    base = f"{{pipelinerl:{run_id}:{spec.name}:{spec.instance}:0}}"
    return Keys(*(f"{base}:{name}" for name in ("log", "count", "size", "consumed")))


def offset_of(row_id: bytes) -> int:
    return int(row_id.split(b"-")[0]) - 1


class RedisWriter(LockedWriter[T]):
    """Writer of one stream; continues after its last record.

    Args:
        client: connection of this writer alone; closed with it.
        keys: of the stream.
        record_type: struct, or union of structs, that the stream holds.
        directory: folder of the stream in the run directory, for its lock and archive.
        config: `flush` waits for the server's append-only file unless `fsync` is `never`; with `always` every write
        does. limit_bytes: size limit of the stream in Redis. consumers: have read a record before it leaves Redis;
        without consumers the older half of the log may leave.

    Raises:
        StreamError: the stream has a writer already, the server does not answer, or it has lost records.
    """

    def __init__(
        self,
        client: Client,
        keys: Keys,
        record_type: Any,
        directory: Path,
        config: RedisStreams,
        limit_bytes: int,
        consumers: Sequence[str] = (),
    ) -> None:
        self._client, self._keys, self._config = client, keys, config
        self._limit_bytes, self._consumers = limit_bytes, list(consumers)
        # Sent records that the server may still lose: (number, time, bytes).
        self._tail: deque[tuple[int, float, bytes]] = deque()
        self._tail_bytes = 0
        self._warned = False
        self._waits_no_more = threading.Event()
        archive = directory / ARCHIVE_FOLDER
        self._open_archive = lambda: FileWriter[T](
            archive, record_type, config.shard_bytes, config.fsync, config.retention == "all"
        )
        self._archive: FileWriter[T] | None = None
        super().__init__(keys.log, directory, record_type)
        with self._opening(RedisError):
            self._append, self._trim = client.register_script(_APPEND), client.register_script(_TRIM)
            self._next = int(client.get(keys.written) or 0)
            last: Any = client.xrevrange(keys.log, count=1)
            if (found := offset_of(last[0][0]) + 1 if last else 0) != self._next:
                raise self._error(f"the server counts {self._next} records, but its log ends after {found}. {_RESTORE}")
            if list_shards(archive):
                self._archive = self._open_archive()
                if (archived := self._archive.next_offset) > self._next:
                    raise self._error(
                        f"the server has {self._next} records, but {archived} were written: those after the archive "
                        f"are lost. {_RESTORE}"
                    )

    def write(self, record: T) -> int:
        """Append one record once there is room for it, and return its offset.

        Raises:
            StreamError: the record cannot be encoded (the stream stays usable); the server refused it, is gone, or lost
                records that are no longer in memory; or there was no room for too long.
            NoRoom: there is no room, and `end_waits` was called.
        """
        data = self._codec.encode(record)
        with self._mutex:
            self._check_usable()
            number = self._next + 1
            try:
                while (count := self._send(number, data, self._limit_bytes)) != number:
                    if count == _FULL:
                        self._make_room()
                    else:
                        self._resend(count)
            except RedisError as error:
                raise self._error(f"offset {self._next} cannot be written: {error}") from error
            self._remember(number, data)
            self._next = number
            if self._config.fsync == "always":
                self._wait_for_disk()
            return number - 1

    def flush(self) -> None:
        """Wait until the server has all records on its disk, unless the policy is `never`."""
        with self._mutex:
            self._check_usable()
            if self._config.fsync != "never":
                self._wait_for_disk()

    def end_waits(self) -> None:
        """Make writes that wait for room, now or later, fail with NoRoom. Thread-safe."""
        self._waits_no_more.set()

    def close(self) -> None:
        """Release the stream to another writer. May be called twice. Ends a write that waits for room."""
        self.end_waits()
        with self._mutex:
            self._broken = self._broken or "is closed"
            self._client.close()
            if self._archive is not None:
                self._archive.close()
            super().close()

    def _send(self, number: int, data: bytes, limit_bytes: int = _NO_LIMIT) -> int:
        keys = [self._keys.log, self._keys.written, self._keys.size]
        count = int(self._append(keys=keys, args=[number, FIELD, data, limit_bytes, OVERHEAD_BYTES]))
        if count == _CONFLICT:
            self._broken = f"holds another record at offset {number - 1}: there was a second writer"
            raise self._error(self._broken)
        return count

    def _resend(self, count: int) -> None:
        """The server has only `count` records: send the later ones again, whether there is room or not."""
        rest = [(number, data) for number, _, data in self._tail if number > count]
        if len(rest) != self._next - count:
            self._broken = f"lost the records of offsets {count}..{self._next - 1} when the server was restarted"
            raise self._error(self._broken)
        logger.warning("%s came back without its last %d records; sending them again", self._keys.log, len(rest))
        for number, data in rest:
            if (found := self._send(number, data)) != number:
                raise self._error(f"has {found} records where {number} were expected")

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
        except ResponseError as error:
            # An older server, or one without an append-only file: its owner chose the durability.
            if not self._warned:
                self._warned = True
                logger.warning("%s: the server cannot confirm that records are on its disk: %s", self._keys.log, error)
            return
        except RedisError as error:
            raise self._error(f"cannot be flushed: {error}") from error
        if synced[0] < 1:
            raise self._error(f"the server did not write its records to the disk within {AOF_TIMEOUT_MS} ms")

    def _make_room(self) -> None:
        """Move records to the archive; if none may go yet, wait until a consumer has read some.

        Raises:
            NoRoom: nothing can be moved, and `end_waits` was called.
            StreamError: no consumer read a record in time, or records are missing.
        """
        end, is_told = time.monotonic() + self._config.backpressure_timeout_s, False
        refusal = f"offset {self._next} cannot be written: the stream is full"
        while not self._move(self._first_to_keep()):
            if self._waits_no_more.is_set():
                raise NoRoom(str(self._error(f"{refusal}, and its reader is no longer waited for")))
            if time.monotonic() > end:
                raise self._error(
                    f"{refusal} ({self._limit_bytes} bytes, its share of streams.byte_budget), and for "
                    f"{self._config.backpressure_timeout_s:g} s (streams.backpressure_timeout_s) no record was read: "
                    f"{self._consumed()}. `python -m pipelinerl status` shows what that process waits for; or raise "
                    "the budget"
                )
            if not is_told:
                is_told = True
                logger.warning("%s is full: waiting for %s", self._keys.log, " and ".join(self._consumers))
            self._waits_no_more.wait(ROOM_POLL_S)

    def _move(self, end: int) -> int:
        """Move records before offset `end` to the archive, about MOVE_BYTES at most; return how many bytes are free."""
        freed = 0
        goal = max(1, min(MOVE_BYTES, self._limit_bytes // 8))
        while freed < goal and end > 0:
            rows: Any = self._client.xrange(self._keys.log, "-", f"{end}-0", count=MOVE_ENTRIES)
            if not rows:
                break
            if self._archive is None:
                self._archive = self._open_archive()
            size = 0
            for row_id, fields in rows:
                self._put(self._archive, offset_of(row_id), fields[FIELD])
                last, size = row_id, size + len(fields[FIELD]) + OVERHEAD_BYTES
                if freed + size >= goal:
                    break
            self._archive.flush()
            # Ids start at 1, so this keeps the entry after `last`.
            self._trim(keys=[self._keys.log, self._keys.size], args=[f"{offset_of(last) + 2}-0", size])
            freed += size
        return freed

    def _put(self, archive: FileWriter[T], offset: int, data: bytes) -> None:
        # After a crash between the two steps the archive has records that are still in the log.
        if offset < archive.next_offset:
            return
        if offset > archive.next_offset:
            raise self._error(f"the records of offsets {archive.next_offset}..{offset - 1} are gone from the server")
        archive.write(self._codec.decode(data))

    def _first_to_keep(self) -> int:
        """First offset that must stay in Redis. The last record always does."""
        if not self._consumers:
            reply: Any = self._client.xlen(self._keys.log)
            return self._next - max(1, int(reply) // 2)
        taken: Any = self._client.hmget(self._keys.consumed, self._consumers)
        return min(self._next - 1, *(int(offset or 0) for offset in taken))

    def _consumed(self) -> str:
        taken: Any = self._client.hmget(self._keys.consumed, self._consumers)
        return ", ".join(
            f"{name} is at offset {offset.decode()}" if offset is not None else f"{name} has not come yet"
            for name, offset in zip(self._consumers, taken, strict=True)
        )
