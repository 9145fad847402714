"""Opens the streams of one run with the backend that its configuration names."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Generic, TypeVar, cast
from urllib.parse import quote, unquote

from pipelinerl.config.resources import STREAM_BACKENDS, StreamsConfig
from pipelinerl.errors import ConfigError, StreamError
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.base import CONSUMERS, StreamBackend, StreamReader, StreamSpec, StreamWriter
from pipelinerl.streams.shards import stream_dir

T = TypeVar("T")
Result = TypeVar("Result")

OWNER_FILE = "run_id"
#: Holds an empty file for every stream that was opened for writing: what has to be there when the run is resumed.
OPENED_FOLDER = "opened"


def backend_of(config: StreamsConfig) -> type[StreamBackend]:
    """The backend that the configuration names: a built-in one, or the class `Streams` of a user's module."""
    module, _, name = STREAM_BACKENDS.get(config.backend, f"{config.backend}:Streams").partition(":")
    try:
        return cast("type[StreamBackend]", getattr(importlib.import_module(module), name))
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            "streams.backend", config.backend, "a module that can be imported, with a class Streams", f"{error}."
        ) from error


class StreamHub:
    """Typed readers and writers of one run.

    Args:
        config: section `streams` of the configuration.
        run_dir: the run's directory.
        run_id: identity of the run. The first hub writes it into the folder `streams`; the folder of another run is
            refused. None: read whatever run is there; nothing is created.
        environ: environment variables, which may name a server (see `serve` of the backend).

    Raises:
        StreamError: the folder holds another run's streams, or cannot be written; a server cannot be used.
    """

    def __init__(
        self,
        config: StreamsConfig,
        run_dir: RunDir,
        run_id: str | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._config = config
        self._root = run_dir.streams
        self.run_id = _owner(run_dir.streams) if run_id is None else _claim(run_dir.streams, run_id)
        environ = os.environ if environ is None else environ
        self._backend = backend_of(config)(config, run_dir.streams, self.run_id, environ)

    def writer(self, topic: str, instance: str, record_type: Any, is_consumed: bool = True) -> StreamWriter[Any]:
        """Open a stream for appending; it has one writer at a time.

        `is_consumed`: whether the readers in `CONSUMERS` are part of this run; False: the writer waits for nobody.
        """
        consumers = CONSUMERS.get(topic, ()) if is_consumed else ()
        spec = StreamSpec(topic, instance)
        writer = self._backend.writer(spec, record_type, consumers)
        _note_opened(self._root, stream_dir(Path(), spec).as_posix())
        return writer

    def loop_writer(self, topic: str, instance: str, record_type: Any, is_consumed: bool = True) -> LoopWriter[Any]:
        """As `writer`, for an event loop, which is never blocked."""
        writer = self.writer(topic, instance, record_type, is_consumed=is_consumed)
        return LoopWriter(writer, self._backend.may_wait)

    def reader(
        self, topic: str, instance: str, record_type: Any, offset: int = 0, consumer: str | None = None
    ) -> StreamReader[Any]:
        """Open a stream for reading from `offset`. It need not exist yet.

        `consumer`: one of `CONSUMERS[topic]`, for the one reader that the writer must not run too far ahead of.
        """
        return self._backend.reader(StreamSpec(topic, instance), record_type, offset, consumer)

    def places(self, topic: str, instance: str) -> list[int]:
        """Ascending offsets from which a reader starts cheaply, beginning with the oldest record; none: no record yet.

        Creates nothing. Raises StreamError if a server does not answer.
        """
        return self._backend.places(StreamSpec(topic, instance))

    def commit(self, topic: str, instance: str, offset: int) -> None:
        """Note that no resume reads whole records before `offset`; with `streams.retention=heads` their tokens may
        go."""
        if self._config.retention != "all":
            self._backend.commit(StreamSpec(topic, instance), offset)


class LoopWriter(Generic[T]):
    """A writer for an event loop, which keeps running while a record waits for the disk, a server, or room.

    If calls `may_wait`, they run in one thread, in order; else they are direct. Nothing is buffered but what callers
    await. Owns `writer`: `close` closes it.
    """

    def __init__(self, writer: StreamWriter[T], may_wait: bool) -> None:
        self._writer = writer
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] | None = None
        if may_wait:
            self._calls = queue.SimpleQueue()
            # A daemon, unlike threads of a pool: a stuck write must not keep the process alive.
            threading.Thread(target=_run_calls, args=(self._calls,), name="stream-writer", daemon=True).start()

    async def write(self, record: T) -> int:
        """Append one record and return its offset once it is written, which cancelling the caller does not prevent.

        Raises:
            NoRoom: the stream is full and `end_waits` was called; the record is not in the stream.
            StreamError: as the writer's `write`.
        """
        return await self._call(lambda: self._writer.write(record))

    async def flush(self) -> None:
        """Make everything written so far as durable as `streams.fsync` asks for."""
        await self._call(self._writer.flush)

    def end_waits(self) -> None:
        """Make writes without room fail with `NoRoom`, including those that wait now."""
        self._writer.end_waits()

    async def close(self) -> None:
        """Write and flush what was asked for without waiting for readers, then release the stream.

        Raises:
            StreamError: records could not be made durable.
        """
        self.end_waits()
        try:
            await self._call(self._finish)
        finally:
            if self._calls is not None:
                self._calls.put(None)
                self._calls = None  # the closed writer refuses later calls

    def _finish(self) -> None:
        try:
            self._writer.flush()
        finally:
            self._writer.close()

    async def _call(self, call: Callable[[], Result]) -> Result:
        if self._calls is None:
            return call()
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        self._calls.put((call, future))
        return await asyncio.shield(asyncio.wrap_future(future))


def _run_calls(calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]) -> None:
    while (item := calls.get()) is not None:
        call, future = item
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised in whoever awaits it
            future.set_exception(error)


def lost_streams(run_dir: RunDir) -> list[str]:
    """Streams of a stopped run that were deleted, as folders relative to its directory.

    A reader would wait for their records, and a writer would start them again from offset 0.
    """
    root = run_dir.streams
    names = _opened(root)
    if not names and not (root / OWNER_FILE).exists():
        # Models and metrics come after the streams.
        files = (*_visible(run_dir.finetune), run_dir.metrics_file)
        return [root.name] if any(file.exists() for file in files) else []
    return [f"{root.name}/{name}" for name in names if not any(_visible(root / name))]


def _visible(folder: Path) -> list[Path]:
    return [file for file in folder.iterdir() if not file.name.startswith(".")] if folder.is_dir() else []


def _opened(root: Path) -> list[str]:
    with _faults_of(root):
        folder = root / OPENED_FOLDER
        return sorted(unquote(file.name) for file in folder.iterdir()) if folder.is_dir() else []


def _note_opened(root: Path, name: str) -> None:
    """Note a stream that has a folder. One file each, as processes of several nodes do so at once on a shared disk."""
    if (root / name).is_dir():
        with _faults_of(root):
            (root / OPENED_FOLDER).mkdir(exist_ok=True)
            (root / OPENED_FOLDER / quote(name, safe="")).touch()


def _owner(root: Path) -> str:
    with _faults_of(root):
        owner = root / OWNER_FILE
        return owner.read_text(encoding="utf-8") if owner.exists() else ""


def _claim(root: Path, run_id: str) -> str:
    """Write `run_id` into the folder unless it has an owner, which must be the same. Atomic: many processes start at
    once."""
    with _faults_of(root):
        owner = root / OWNER_FILE
        root.mkdir(parents=True, exist_ok=True)
        if not owner.exists():
            draft = root / f"{OWNER_FILE}.{os.getpid()}.{os.urandom(4).hex()}"
            draft.write_text(run_id, encoding="utf-8")
            with contextlib.suppress(FileExistsError):
                os.link(draft, owner)
            draft.unlink()
    if (found := _owner(root)) != run_id:
        raise StreamError(
            f"{root} holds the streams of run {found!r}, this is run {run_id!r}. "
            "Choose another output_dir, or set force_restart=true to move the old run aside"
        )
    return run_id


@contextlib.contextmanager
def _faults_of(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StreamError(f"{root}: cannot hold streams: {error}") from error
