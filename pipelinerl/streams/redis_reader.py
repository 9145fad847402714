"""Reads the records of one Redis stream in order, and waits for new ones.

Called through `StreamHub.reader`. Waits in a blocking XREAD; the wait is cut into slices so that `wake` is noticed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import redis

from pipelinerl.errors import StreamError
from pipelinerl.records.codec import RecordCodec
from pipelinerl.streams.base import Entry
from pipelinerl.streams.redis_writer import FIELD

T = TypeVar("T")

SLICE_S = 0.5
# One reply is meant to be about this large; the size of the last records says how many that is.
BATCH_BYTES = 1 << 18
_FIELD = FIELD.encode("ascii")


class RedisReader(Generic[T]):
    """Reader of one stream from `offset` on. The stream need not exist yet.

    Args:
        client: connection of this reader alone; closed with it.
        key: of the log.
        record_type: struct, or union of structs, that the stream holds.
        offset: first record to return. It may lie in the future.
    """

    def __init__(self, client: redis.Redis, key: str, record_type: Any, offset: int = 0) -> None:
        if offset < 0:
            raise StreamError(f"stream {key}: cannot read from offset {offset}, offsets count from 0")
        self._client, self._key = client, key
        self._codec = RecordCodec[T](record_type)
        self._next = offset
        self._record_bytes = BATCH_BYTES // 16
        self._woken = threading.Event()
        self._closed = False

    @property
    def offset(self) -> int:
        """Offset of the record that will be returned next."""
        return self._next

    def read(self, timeout_s: float, max_records: int = 256) -> Sequence[Entry[T]]:
        """Return 1..max_records entries in order, or none after `timeout_s` or `wake`.

        Raises:
            StreamError: the next record is corrupt or gone, with key, offset and reason, or the server is gone.
        """
        if self._closed:
            raise self._error("the reader is closed")
        deadline = time.monotonic() + timeout_s
        count = max(1, min(max_records, BATCH_BYTES // max(1, self._record_bytes)))
        block_s = 0.0
        while True:
            rows = self._fetch(count, block_s)
            rest = deadline - time.monotonic()
            if rows:
                return self._decode(rows)
            if rest <= 0 or self._woken.is_set():
                self._woken.clear()
                return []
            block_s = min(rest, SLICE_S)

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        """Free the connection. May be called twice."""
        self._closed = True
        self._client.close()

    def _fetch(self, count: int, block_s: float) -> list[tuple[bytes, dict[bytes, bytes]]]:
        block_ms = int(block_s * 1000) + 1 if block_s > 0 else None
        try:
            reply: Any = self._client.xread({self._key: f"{self._next}-0"}, count=count, block=block_ms)
        except redis.RedisError as error:
            raise self._error(f"the server does not answer: {error}") from error
        return list(reply[0][1]) if reply else []

    def _decode(self, rows: list[tuple[bytes, dict[bytes, bytes]]]) -> list[Entry[T]]:
        entries: list[Entry[T]] = []
        for row_id, fields in rows:
            try:
                if row_id != b"%d-0" % (self._next + 1):
                    raise StreamError(f"the record is gone, the next one there has the id {row_id.decode()}")
                if _FIELD not in fields:
                    raise StreamError(f"the entry has no field {FIELD!r}")
                record = self._codec.decode(fields[_FIELD])
            except StreamError as error:
                if entries:
                    break
                raise self._error(str(error)) from error
            entries.append(Entry(self._next, record))
            self._record_bytes = len(fields[_FIELD])
            self._next += 1
        return entries

    def _error(self, reason: str) -> StreamError:
        return StreamError(f"stream {self._key}, offset {self._next}: {reason}")
