"""Opens the streams of one run: the only place that knows which backend holds them.

Called by every role (through its context) and by the launcher. Waits for nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelinerl.config.sections import StreamsConfig
from pipelinerl.errors import StreamError
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.base import CONSUMERS, StreamReader, StreamSpec, StreamWriter
from pipelinerl.streams.file_reader import FileReader
from pipelinerl.streams.file_writer import FileWriter
from pipelinerl.streams.index import places
from pipelinerl.streams.layout import check_spec, partition_dir
from pipelinerl.streams.loop_writer import LoopWriter
from pipelinerl.streams.retention import commit

OWNER_FILE = "run_id"
REDIS_URL_KEY = "PIPELINERL_REDIS_URL"
ARCHIVE_FOLDER = "archive"
# Of `byte_budget`: what a stream with consumers may hold (there are two), and what each of the small ones may.
LARGE_SHARE, SMALL_SHARE = 3 / 8, 1 / 64


class StreamHub:
    """Typed readers and writers of the run `run_id`.

    Args:
        config: section `streams` of the configuration.
        run_dir: the run's directory; file streams lie in its folder `streams`.
        run_id: identity of the run. The first hub leaves it in the folder; a folder of another run is refused.
        environ: of this process: `PIPELINERL_REDIS_URL` says where the Redis server is, with its password, which is in
            no file. The launcher sets it for the run's own server, a user for one that needs a password; without it
            `streams.url` counts.

    Raises:
        StreamError: the folder holds another run's streams, or cannot be written; the Redis server cannot be used.
    """

    def __init__(
        self, config: StreamsConfig, run_dir: RunDir, run_id: str, environ: Mapping[str, str] | None = None
    ) -> None:
        self._config = config
        self._root = run_dir.streams
        self.run_id = run_id
        _claim(self._root, run_id)
        self._redis_url = _redis_url(config, os.environ if environ is None else environ)

    def writer(
        self, topic: str, instance: str, record_type: Any, partition: int = 0, is_consumed: bool = True
    ) -> StreamWriter[Any]:
        """Open a stream for appending; see `FileWriter`. One writer at a time per (topic, instance, partition).

        `is_consumed`: whether the readers in `CONSUMERS` are part of this run; False: nobody is waited for.
        """
        spec = StreamSpec(topic, instance, partition)
        directory = self._directory(spec)
        keep_tokens = self._config.retention == "all"
        if self._redis_url is not None:
            from pipelinerl.streams.redis_budget import Archive, Budget
            from pipelinerl.streams.redis_client import connect, stream_keys
            from pipelinerl.streams.redis_writer import RedisWriter

            config, consumers = self._config, CONSUMERS.get(topic, ())
            return RedisWriter[Any](
                connect(self._redis_url),
                stream_keys(self.run_id, spec),
                record_type,
                directory,
                config.fsync,
                Budget(
                    int(config.byte_budget * (LARGE_SHARE if consumers else SMALL_SHARE)),
                    consumers if is_consumed else (),
                    config.backpressure_timeout_s,
                ),
                Archive(directory / ARCHIVE_FOLDER, record_type, config.shard_bytes, config.fsync, keep_tokens),
            )
        return FileWriter[Any](directory, record_type, self._config.shard_bytes, self._config.fsync, keep_tokens)

    def loop_writer(self, topic: str, instance: str, record_type: Any, is_consumed: bool = True) -> LoopWriter[Any]:
        """Open a stream for appending from an event loop, which is never held up. `is_consumed`: as for `writer`."""
        may_wait = self._redis_url is not None or self._config.fsync != "never"
        return LoopWriter(self.writer(topic, instance, record_type, is_consumed=is_consumed), may_wait)

    def reader(
        self,
        topic: str,
        instance: str,
        record_type: Any,
        offset: int = 0,
        partition: int = 0,
        consumer: str | None = None,
    ) -> StreamReader[Any]:
        """Open a stream for reading from `offset`; see `FileReader`. It need not have been written yet.

        `consumer` is one of `CONSUMERS[topic]`, for the one reader that the writer must not run too far ahead of.
        """
        spec = StreamSpec(topic, instance, partition)
        directory = self._directory(spec)
        if self._redis_url is not None:
            from pipelinerl.streams.redis_client import connect, stream_keys
            from pipelinerl.streams.redis_reader import RedisReader

            return RedisReader[Any](
                connect(self._redis_url),
                stream_keys(self.run_id, spec),
                record_type,
                offset,
                directory / ARCHIVE_FOLDER,
                consumer,
            )
        return FileReader[Any](directory, record_type, offset)

    def places(self, topic: str, instance: str, partition: int = 0) -> list[int]:
        """Offsets, ascending from the oldest record, at which a reader can start without reading what lies before.

        Empty: there is no record yet. Nothing is created or changed. Raises StreamError if the server does not answer.
        """
        spec = StreamSpec(topic, instance, partition)
        directory = self._directory(spec)
        if self._redis_url is None:
            return places(directory)
        from pipelinerl.streams.redis_client import connect, log_places, stream_keys

        with contextlib.closing(connect(self._redis_url)) as client:
            in_log = log_places(client, stream_keys(self.run_id, spec))
        archived = places(directory / ARCHIVE_FOLDER)
        return [offset for offset in archived if not in_log or offset < in_log[0]] + in_log

    def commit(self, topic: str, instance: str, offset: int, partition: int = 0) -> None:
        """Note that no resume reads whole records before `offset`: with `streams.retention=heads` tokens may go."""
        if self._config.retention == "all":
            return
        directory = self._directory(StreamSpec(topic, instance, partition))
        commit(directory / ARCHIVE_FOLDER if self._redis_url is not None else directory, offset)

    def _directory(self, spec: StreamSpec) -> Path:
        check_spec(spec)
        return partition_dir(self._root, spec)


def _redis_url(config: StreamsConfig, environ: Mapping[str, str]) -> str | None:
    """URL of the checked server; None for file streams."""
    if config.backend != "redis":
        return None
    url = environ.get(REDIS_URL_KEY) or config.url
    if not url:
        raise StreamError(f"streams=redis: no server. Set streams.url, or start the process with {REDIS_URL_KEY}")
    from pipelinerl.streams.redis_client import CHECK_RETRIES, check_server, connect

    with contextlib.closing(connect(url, CHECK_RETRIES)) as client:
        check_server(client, url)
    return url


def _claim(root: Path, run_id: str) -> None:
    """Leave `run_id` in the folder if nobody did, else compare. Atomic: many processes start at once."""
    owner = root / OWNER_FILE
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not owner.exists():
            draft = root / f"{OWNER_FILE}.{os.getpid()}.{os.urandom(4).hex()}"
            draft.write_text(run_id, encoding="utf-8")
            with contextlib.suppress(FileExistsError):
                os.link(draft, owner)
            draft.unlink()
        found = owner.read_text(encoding="utf-8")
    except OSError as error:
        raise StreamError(f"{root}: cannot hold streams: {error}") from error
    if found != run_id:
        raise StreamError(
            f"{root} holds the streams of run {found!r}, this is run {run_id!r}. "
            "Choose another output_dir, or set force_restart=true to move the old run aside"
        )
