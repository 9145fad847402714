"""Keeps one Redis stream within its bytes: moves records that all consumers have taken to files of the run.

Called by the Redis writer when a record does not fit. Waits for the consumers' next step, up to a time-out. Nothing is
dropped: what leaves Redis lies in the archive (shards as the file backend writes them), where readers that start far
back, the audit and the replay find it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import redis

from pipelinerl.errors import NoRoom, StreamError
from pipelinerl.records.codec import RecordCodec
from pipelinerl.streams.file_writer import FileWriter
from pipelinerl.streams.fsync import FsyncPolicy
from pipelinerl.streams.layout import list_shards
from pipelinerl.streams.redis_client import StreamKeys

logger = logging.getLogger(__name__)

FIELD = "r"
# Redis needs about this much for an entry beside its bytes.
OVERHEAD_BYTES = 128
MOVE_BYTES = 32 * 2**20
FETCH_ENTRIES = 64
SLICE_S = 0.5

# Entries below an id go, and their bytes are given back; a repeated call finds none and gives nothing back.
TRIM = """
if redis.call('XTRIM', KEYS[1], 'MINID', '=', ARGV[1]) == 0 then return 0 end
local left = tonumber(redis.call('GET', KEYS[2]) or '0') - tonumber(ARGV[2])
if left < 0 then left = 0 end
redis.call('SET', KEYS[2], string.format('%d', left))
return 1
"""


class Budget(NamedTuple):
    """Of one stream. `consumers` must have taken a record before it may leave Redis; without any, the older half of
    the log may. `timeout_s` is how long a writer waits for them."""

    limit_bytes: int
    consumers: tuple[str, ...]
    timeout_s: float


class Archive:
    """The part of one stream that has left Redis: file shards with the same offsets, from 0 on."""

    def __init__(
        self, directory: Path, record_type: Any, shard_bytes: int, fsync: FsyncPolicy, keep_tokens: bool = True
    ) -> None:
        self._directory = directory
        self._options = (record_type, shard_bytes, fsync, keep_tokens)
        self._writer: FileWriter[Any] | None = None

    @property
    def exists(self) -> bool:
        return bool(list_shards(self._directory))

    def open(self) -> FileWriter[Any]:
        if self._writer is None:
            self._writer = FileWriter(self._directory, *self._options)
        return self._writer

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Mover:
    """Makes room in one stream.

    Args:
        client, keys: of the writer.
        codec: of the stream's records.
        archive: where records go.
        budget: of the stream.
    """

    def __init__(
        self, client: redis.Redis, keys: StreamKeys, codec: RecordCodec[Any], archive: Archive, budget: Budget
    ) -> None:
        self._client, self._keys, self._codec = client, keys, codec
        self._archive, self.budget = archive, budget
        self._trim = client.register_script(TRIM)

    def make_room(self, count: int, stopped: Callable[[], bool]) -> None:
        """Move records to the archive, or wait until a consumer has taken some and then move them.

        Args:
            count: records in the stream so far; the last one always stays.
            stopped: true when nobody is to be waited for any more.

        Raises:
            NoRoom: `stopped`, and nothing can be moved.
            StreamError: no consumer took a step for `timeout_s`, or records are missing.
        """
        started, is_told = time.monotonic(), False
        deadline = started + self.budget.timeout_s
        while True:
            mark = self._mark()
            if self.move(self._releasable(count)):
                if is_told:
                    logger.info("%s has room again after %.1f s", self._keys.log, time.monotonic() - started)
                return
            if stopped():
                raise NoRoom("is full, and its reader is not waited for any more")
            if (rest := deadline - time.monotonic()) <= 0:
                raise StreamError(self._full())
            if not is_told:
                is_told = True
                logger.warning("%s is full: waiting for %s", self._keys.log, " and ".join(self.budget.consumers))
            self._client.xread({self._keys.notice: mark}, block=int(min(rest, SLICE_S) * 1000) + 1)

    def move(self, end: int) -> int:
        """Move records before offset `end`, about MOVE_BYTES at most; returns how many bytes are free now."""
        freed = 0
        goal = max(1, min(MOVE_BYTES, self.budget.limit_bytes // 8))
        while freed < goal:
            rows: Any = self._client.xrange(self._keys.log, "-", f"{end}-0", count=FETCH_ENTRIES) if end > 0 else []
            size = taken = 0
            last = b"0"
            writer = self._archive.open() if rows else None
            for row_id, fields in rows:
                if writer is not None:
                    self._put(writer, int(row_id.split(b"-")[0]) - 1, fields)
                size += len(fields[FIELD.encode()]) + OVERHEAD_BYTES
                taken, last = taken + 1, row_id
                if freed + size >= goal:
                    break
            if writer is None or not taken:
                break
            writer.flush()
            number = int(last.split(b"-")[0])
            self._trim(keys=[self._keys.log, self._keys.size], args=[f"{number + 1}-0", size])
            freed += size
        return freed

    def _put(self, writer: FileWriter[Any], offset: int, fields: dict[bytes, bytes]) -> None:
        # After a crash between the two steps the archive has records that are still in the log.
        if offset < writer.next_offset:
            return
        if offset > writer.next_offset:
            raise StreamError(f"the records of offsets {writer.next_offset}..{offset - 1} are gone from the server")
        writer.write(self._codec.decode(fields[FIELD.encode()]))

    def _releasable(self, count: int) -> int:
        """First offset that must stay."""
        if not self.budget.consumers:
            reply: Any = self._client.xlen(self._keys.log)
            return count - max(1, int(reply) // 2)
        taken: Any = self._client.hmget(self._keys.consumed, list(self.budget.consumers))
        return min(count - 1, *(int(offset or 0) for offset in taken))

    def _mark(self) -> str:
        last: Any = self._client.xrevrange(self._keys.notice, count=1)
        return last[0][0].decode() if last else "0-0"

    def _full(self) -> str:
        taken: Any = self._client.hmget(self._keys.consumed, list(self.budget.consumers))
        where = ", ".join(
            f"{name} is at offset {offset.decode()}" if offset is not None else f"{name} has not come yet"
            for name, offset in zip(self.budget.consumers, taken, strict=True)
        )
        return (
            f"is full ({self.budget.limit_bytes} bytes, its share of streams.byte_budget), and for "
            f"{self.budget.timeout_s:g} s (streams.backpressure_timeout_s) nobody took a record: {where}. "
            "See what that process waits for (`python -m pipelinerl status`), or raise the budget"
        )
