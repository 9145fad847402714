"""Streams in Redis (or Valkey): the backend and its reader; see `redis_writer` for the layout of a stream."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from pipelinerl.config.resources import RedisStreams
from pipelinerl.errors import ConfigError, StreamError
from pipelinerl.records.codec import RecordCodec
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.base import Entry, StreamReader, StreamSpec, StreamWriter
from pipelinerl.streams.files import FileReader
from pipelinerl.streams.redis_server import (
    CHECK_RETRIES,
    REDIS_URL_KEY,
    Client,
    RedisError,
    RedisServer,
    check_place,
    check_server,
    check_url,
    connect,
    redis_url,
)
from pipelinerl.streams.redis_writer import ARCHIVE_FOLDER, FIELD, Keys, RedisWriter, offset_of, stream_keys
from pipelinerl.streams.shards import commit, list_shards, stream_dir

T = TypeVar("T")

# Shares of `byte_budget` for the two streams with consumers, and for each of the small ones.
LARGE_SHARE, SMALL_SHARE = 3 / 8, 1 / 64
# A waiting consumer repeats its offset, which a restarted server may have lost.
TELL_AGAIN_S = 2.0
# Intended size of a reply; the size of the last record says how many records that is.
FETCH_BYTES = 1 << 18
# Size of one read: small, so that decoded records are used while they are in the processor's caches.
BATCH_BYTES = 1 << 14
# A log can be read from any offset; `places` names every so many.
LOG_STRIDE = 64
# Blocking reads are split, so that `wake` is noticed.
SLICE_S = 0.5


class RedisBackend:
    """Raises StreamError if there is no server, or if it could lose records."""

    is_on_disk: ClassVar[bool] = False

    def __init__(self, config: RedisStreams, root: Path, run_id: str, environ: Mapping[str, str]) -> None:
        self._config, self._root, self._run_id = config, root, run_id
        self.may_wait = True
        url = redis_url(config, environ)
        if url is None:
            raise StreamError(f"streams=redis: no server. Set streams.url, or start the process with {REDIS_URL_KEY}")
        self._url = url
        with contextlib.closing(connect(url, CHECK_RETRIES)) as client:
            check_server(client, url)

    def writer(self, spec: StreamSpec, record_type: Any, consumers: Sequence[str]) -> StreamWriter[Any]:
        limit = int(self._config.byte_budget * (LARGE_SHARE if consumers else SMALL_SHARE))
        keys, folder = stream_keys(self._run_id, spec), stream_dir(self._root, spec)
        return RedisWriter[Any](connect(self._url), keys, record_type, folder, self._config, limit, consumers)

    def reader(self, spec: StreamSpec, record_type: Any, offset: int, consumer: str | None) -> StreamReader[Any]:
        keys = stream_keys(self._run_id, spec)
        return RedisReader[Any](connect(self._url), keys, record_type, offset, self._archive(spec), consumer)

    def places(self, spec: StreamSpec) -> list[int]:
        log = stream_keys(self._run_id, spec).log
        try:
            with contextlib.closing(connect(self._url)) as client:
                ends: list[Any] = [client.xrange(log, count=1), client.xrevrange(log, count=1)]
        except RedisError as error:
            raise StreamError(f"stream {log}: the server does not answer: {error}") from error
        archived = list_shards(self._archive(spec))
        if not all(ends):
            return archived
        first, last = (offset_of(rows[0][0]) for rows in ends)
        return [offset for offset in archived if offset < first] + list(range(first, last + 1, LOG_STRIDE))

    def commit(self, spec: StreamSpec, offset: int) -> None:
        commit(self._archive(spec), offset)

    def _archive(self, spec: StreamSpec) -> Path:
        return stream_dir(self._root, spec) / ARCHIVE_FOLDER

    @classmethod
    def check(cls, config: RedisStreams, environ: Mapping[str, str], num_nodes: int) -> None:
        check_url(config, environ, num_nodes)

    @classmethod
    @contextlib.contextmanager
    def serve(cls, config: RedisStreams, run_dir: RunDir, environ: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
        if url := redis_url(config, environ):
            check_place(run_dir, url)
            yield environ
            return
        with RedisServer(run_dir.root / "redis", config) as server:
            check_place(run_dir, server.url, "the run's own server")
            yield {**environ, REDIS_URL_KEY: server.url}

    @classmethod
    def reopen(
        cls, config: RedisStreams, run_dir: RunDir, environ: Mapping[str, str], is_running: bool
    ) -> contextlib.AbstractContextManager[Mapping[str, str]]:
        if is_running and not redis_url(config, environ):
            raise ConfigError(
                "streams.backend",
                "redis",
                f"the address of the running run's own server in {REDIS_URL_KEY}",
                "Its password is in no file. Wait until the run has ended, or use your own server (streams.url).",
            )
        return cls.serve(config, run_dir, environ)


class RedisReader(Generic[T]):
    """Reader of one stream from `offset` on. The stream need not exist yet.

    Args:
        client: connection of this reader alone; closed with it.
        keys: of the stream.
        record_type: struct, or union of structs, that the stream holds.
        offset: first record to return. It may lie in the future.
        archive: folder of records that have left Redis.
        consumer: the reader that records are kept for; what it has returned may leave Redis at its next read.
    """

    def __init__(
        self, client: Client, keys: Keys, record_type: Any, offset: int, archive: Path, consumer: str | None = None
    ) -> None:
        self._client, self._keys = client, keys
        self._record_type, self._archive, self._consumer = record_type, archive, consumer
        self._archived: FileReader[T] | None = None
        self._told, self._told_at = -1, 0.0
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
        """See `StreamReader.read`."""
        if self._closed:
            raise self._error("the reader is closed")
        deadline, block_s = time.monotonic() + timeout_s, 0.0
        try:
            self._tell()
            while not (entries := self._take_archived(max_records) or self._take(max_records)):
                self._fetch(block_s)
                rest = deadline - time.monotonic()
                if not self._rows and (rest <= 0 or self._woken.is_set()):
                    self._woken.clear()
                    break
                block_s = max(0.0, min(rest, SLICE_S))
                self._tell()
        except RedisError as error:
            raise self._error(f"the server does not answer: {error}") from error
        return entries

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        """Free the connection. May be called twice."""
        self._closed = True
        if self._archived is not None:
            self._archived.close()
        self._client.close()

    def _fetch(self, block_s: float) -> None:
        """Fetch raw entries, waiting up to `block_s` for the first."""
        count = max(1, FETCH_BYTES // max(1, self._record_bytes))
        block_ms = int(block_s * 1000) + 1 if block_s > 0 else None
        reply: Any = self._client.xread({self._keys.log: f"{self._next}-0"}, count=count, block=block_ms)
        if reply:
            self._rows.extend(reply[0][1])

    def _tell(self) -> None:
        """Tell the writer that everything before the next record was read. Idempotent."""
        now = time.monotonic()
        if self._consumer is not None and (self._told != self._next or now > self._told_at + TELL_AGAIN_S):
            self._client.hset(self._keys.consumed, self._consumer, str(self._next))
            self._told, self._told_at = self._next, now

    def _take_archived(self, max_records: int) -> list[Entry[T]]:
        if self._archived is None:
            # The log's last entry is never archived, so a later one shows that the next record was.
            if not self._rows or self._is_next(self._rows[0][0]) or not list_shards(self._archive):
                return []
            self._archived = FileReader[T](self._archive, self._record_type, self._next)
        entries = list(self._archived.read(0, max_records))
        if entries:
            self._rows.clear()
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
                if not self._is_next(row_id):
                    raise StreamError(f"the record is gone; the next one has the id {row_id.decode()}")
                record = self._codec.decode(fields[FIELD])
            except StreamError as error:
                if entries:
                    break
                self._rows.clear()  # the next call asks the server again
                raise self._error(str(error)) from error
            self._rows.popleft()
            entries.append(Entry(self._next, record))
            self._record_bytes = len(fields[FIELD])
            taken_bytes += self._record_bytes
            self._next += 1
        return entries

    def _is_next(self, row_id: bytes) -> bool:
        return row_id == b"%d-0" % (self._next + 1)

    def _error(self, reason: str) -> StreamError:
        return StreamError(f"stream {self._keys.log}, offset {self._next}: {reason}")
