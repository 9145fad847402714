"""Reads the records of one Redis stream in order, and waits for new ones.

Called through `StreamHub.reader`. Waits in a blocking XREAD; the wait is cut into slices so that `wake` is noticed.
Records that have left Redis are read from the archive. A consumer also tells the writer how far it has come, and again
while it waits: a server that was restarted may have lost it, and a writer without room would wait for that.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import redis

from pipelinerl.errors import StreamError
from pipelinerl.records.codec import RecordCodec
from pipelinerl.streams.base import Entry
from pipelinerl.streams.file_reader import FileReader
from pipelinerl.streams.layout import list_shards
from pipelinerl.streams.redis_budget import FIELD
from pipelinerl.streams.redis_client import StreamKeys

T = TypeVar("T")

SLICE_S = 0.5
# A waiting consumer repeats so often how far it has come.
TELL_AGAIN_S = 2.0
# One reply is meant to be about this large; the size of the last records says how many that is.
FETCH_BYTES = 1 << 18
# One read returns about this much at most: large records, decoded by the hundred, would fall out of every cache.
BATCH_BYTES = 1 << 14
_FIELD = FIELD.encode("ascii")


class RedisReader(Generic[T]):
    """Reader of one stream from `offset` on. The stream need not exist yet.

    Args:
        client: connection of this reader alone; closed with it.
        keys: of the stream.
        record_type: struct, or union of structs, that the stream holds.
        offset: first record to return. It may lie in the future.
        archive: folder of the records that have left Redis.
        consumer: name of the reader that records are kept for; what it has returned may leave Redis at its next read.
    """

    def __init__(
        self,
        client: redis.Redis,
        keys: StreamKeys,
        record_type: Any,
        offset: int = 0,
        archive: Path | None = None,
        consumer: str | None = None,
    ) -> None:
        if offset < 0:
            raise StreamError(f"stream {keys.log}: cannot read from offset {offset}, offsets count from 0")
        self._client, self._keys, self._key = client, keys, keys.log
        self._record_type, self._archive, self._consumer = record_type, archive, consumer
        self._archived: FileReader[T] | None = None
        self._told, self._told_at = -1, 0.0
        self._untold_bytes = 0
        self._codec = RecordCodec[T](record_type)
        self._next = offset
        self._record_bytes = FETCH_BYTES // 16
        self._rows: deque[tuple[bytes, dict[bytes, bytes]]] = deque()
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
        block_s = 0.0
        if self._rows and self._untold_bytes >= FETCH_BYTES:
            # A writer may need the room of large records before all are taken that came in one reply.
            self._ask(self._tell)
        while not self._rows:
            if entries := self._from_archive(max_records):
                return entries
            self._fetch(block_s)
            rest = deadline - time.monotonic()
            if not self._rows and (rest <= 0 or self._woken.is_set()):
                self._woken.clear()
                return []
            block_s = max(0.0, min(rest, SLICE_S))
        if self._is_behind_a_gap() and (entries := self._open_archive(max_records)):
            return entries
        return self._take(max_records)

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        """Free the connection. May be called twice."""
        self._closed = True
        if self._archived is not None:
            self._archived.close()
        self._client.close()

    def _fetch(self, block_s: float) -> None:
        """Load raw entries, waiting up to `block_s` for the first."""
        count = max(1, FETCH_BYTES // max(1, self._record_bytes))
        block_ms = int(block_s * 1000) + 1 if block_s > 0 else None
        self._ask(self._tell)
        reply = self._ask(lambda: self._client.xread({self._key: f"{self._next}-0"}, count=count, block=block_ms))
        if reply:
            self._rows.extend(reply[0][1])

    def _tell(self) -> None:
        """Let the writer know that everything before the next record was taken. Saying it twice does no harm."""
        now = time.monotonic()
        if self._consumer is None or (self._told == self._next and now < self._told_at + TELL_AGAIN_S):
            return
        with self._client.pipeline(transaction=False) as pipe:
            pipe.hset(self._keys.consumed, self._consumer, self._next)
            pipe.xadd(self._keys.notice, {self._consumer: self._next}, maxlen=1, approximate=False)
            pipe.execute()
        self._told, self._told_at, self._untold_bytes = self._next, now, 0

    def _ask(self, command: Callable[[], Any]) -> Any:
        try:
            return command()
        except redis.RedisError as error:
            raise self._error(f"the server does not answer: {error}") from error

    def _is_behind_a_gap(self) -> bool:
        """Whether the next record has left Redis. The log's last entry never leaves, so this always shows."""
        return self._rows[0][0] != b"%d-0" % (self._next + 1)

    def _open_archive(self, max_records: int) -> list[Entry[T]]:
        if self._archive is None or not list_shards(self._archive):
            return []
        self._archived = FileReader[T](self._archive, self._record_type, self._next)
        if entries := self._from_archive(max_records):
            self._rows.clear()
        return entries

    def _from_archive(self, max_records: int) -> list[Entry[T]]:
        if self._archived is None:
            return []
        entries = list(self._archived.read(0, max_records))
        if entries:
            self._next = entries[-1].offset + 1
        else:
            self._archived.close()
            self._archived = None
        return entries

    def _take(self, max_records: int) -> list[Entry[T]]:
        entries: list[Entry[T]] = []
        taken_bytes = 0
        while self._rows and len(entries) < max_records and taken_bytes < BATCH_BYTES:
            row_id, fields = self._rows[0]
            try:
                if row_id != b"%d-0" % (self._next + 1):
                    raise StreamError(f"the record is gone, the next one there has the id {row_id.decode()}")
                if _FIELD not in fields:
                    raise StreamError(f"the entry has no field {FIELD!r}")
                record = self._codec.decode(fields[_FIELD])
            except StreamError as error:
                if entries:
                    break
                self._rows.clear()  # the next call asks the server again
                raise self._error(str(error)) from error
            self._rows.popleft()
            entries.append(Entry(self._next, record))
            self._record_bytes = len(fields[_FIELD])
            taken_bytes += self._record_bytes
            self._untold_bytes += self._record_bytes
            self._next += 1
        return entries

    def _error(self, reason: str) -> StreamError:
        return StreamError(f"stream {self._key}, offset {self._next}: {reason}")
