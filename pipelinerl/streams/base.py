"""The stream contract: names of a run's streams, writers, readers, and what a backend has to provide.

A stream is an append-only log of records with gap-free offsets from 0, with one writer and any number of readers. Every
backend passes tests/contract/test_streams.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import msgspec

from pipelinerl.config.resources import StreamsConfig
from pipelinerl.errors import StreamError
from pipelinerl.records.codec import RecordCodec
from pipelinerl.rundir.durable import FileLock
from pipelinerl.rundir.layout import RunDir

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)

ACTOR_TOPIC = "actor"
TRAINING_DATA_TOPIC = "training_data"
TRAINER_TOPIC = "trainer"
FATES_TOPIC = "fates"
METRICS_TOPIC = "metrics"
EVALUATION_TOPIC = "evaluation"
EVALUATION_ROLLOUTS_TOPIC = "evaluation_rollouts"
TURNS_TOPIC = "turns"
TOKEN_RATIOS_TOPIC = "token_ratios"
POOL_TOPIC = "pool"
PASSES_TOPIC = "passes"

# Instances: the process that writes.
LAUNCHER = "launch"
ACTOR = "actor_0"
PREPROCESSOR = "preprocessor_0"
TRAINER = "finetune_0"

# Each consumer reads its stream once, from the beginning to the end of the run, so a backend with bounded memory may
# drop what it has read. Streams without a consumer are small.
PREPROCESSOR_CONSUMER = "preprocessor"
TRAINER_CONSUMER = "finetune"
CONSUMERS: dict[str, tuple[str, ...]] = {
    ACTOR_TOPIC: (PREPROCESSOR_CONSUMER,),
    TRAINING_DATA_TOPIC: (TRAINER_CONSUMER,),
}


class StreamSpec(msgspec.Struct, frozen=True):
    """Address of one log: `topic` is what it carries, `instance` the job that writes it.

    `policy` is empty while a run trains one policy; streams of another policy are named `topic@policy`.
    """

    topic: str
    instance: str
    policy: str = ""

    @property
    def name(self) -> str:
        return f"{self.topic}@{self.policy}" if self.policy else self.topic


class Entry(msgspec.Struct, Generic[T], frozen=True):
    """One record with its offset."""

    offset: int
    record: T


class StreamWriter(Protocol[T_contra]):
    """Appends records. A record is visible to readers once `write` returns; `flush` makes it as durable as
    `streams.fsync` asks for. Thread-safe."""

    @property
    def next_offset(self) -> int: ...

    def write(self, record: T_contra) -> int:
        """Append one record and return its offset. Raises StreamError if it cannot be written."""
        ...

    def flush(self) -> None: ...

    def end_waits(self) -> None:
        """From now on, raise NoRoom instead of waiting for room in a full stream. Thread-safe."""
        ...

    def close(self) -> None: ...


class StreamReader(Protocol[T]):
    """Reads records in order from `offset` (the next one to be returned). One thread reads; any may call `wake`."""

    @property
    def offset(self) -> int: ...

    def read(self, timeout_s: float, max_records: int = 256) -> Sequence[Entry[T]]:
        """Return up to `max_records` entries, waiting up to `timeout_s` for the first; none: timeout, or `wake`.

        Raises:
            StreamError: the next record is corrupt or gone; file or key, offset and reason. The records before it were
                returned, and every further call raises again.
        """
        ...

    def wake(self) -> None:
        """Make the blocked `read`, or else the next one, return at once, maybe empty. Thread-safe."""
        ...

    def close(self) -> None: ...


class StreamBackend(Protocol):
    """Where the streams of one run are kept. A backend is a class named in `STREAM_BACKENDS` (config/resources.py).

    A run whose stream folders are missing cannot be resumed (`lost_streams` in streams/hub.py). A backend that keeps
    its records elsewhere has to notice that they are gone: opening a writer must then raise StreamError.

    Class methods concern a run as a whole: `check` before it starts, `serve` while it runs, `reopen` for commands that
    read it from another process.
    """

    #: Whether the records are files of the run directory, readable while no run is active.
    is_on_disk: ClassVar[bool]
    #: Whether `write` and `flush` may take long.
    may_wait: bool

    def __init__(self, config: StreamsConfig, root: Path, run_id: str, environ: Mapping[str, str]) -> None:
        """Raises StreamError if the streams cannot be reached. `root` is the run's folder `streams`."""

    def writer(self, spec: StreamSpec, record_type: Any, consumers: Sequence[str]) -> StreamWriter[Any]:
        """The writer must not run too far ahead of `consumers`."""
        ...

    def reader(self, spec: StreamSpec, record_type: Any, offset: int, consumer: str | None) -> StreamReader[Any]: ...

    def places(self, spec: StreamSpec) -> list[int]:
        """Ascending offsets from which a reader starts cheaply, beginning with the oldest record. Creates nothing."""
        ...

    def commit(self, spec: StreamSpec, offset: int) -> None:
        """No resume reads whole records before `offset`; with `streams.retention=heads` their tokens may go."""
        ...

    @classmethod
    def check(cls, config: StreamsConfig, environ: Mapping[str, str], num_nodes: int) -> None:
        """Raise UserError if a run cannot use this backend."""

    @classmethod
    def serve(
        cls, config: StreamsConfig, run_dir: RunDir, environ: Mapping[str, str]
    ) -> AbstractContextManager[Mapping[str, str]]:
        """Keep what the streams need running. Yields `environ` plus what the run's processes need to find it."""
        return nullcontext(environ)

    @classmethod
    def reopen(
        cls, config: StreamsConfig, run_dir: RunDir, environ: Mapping[str, str], is_running: bool
    ) -> AbstractContextManager[Mapping[str, str]]:
        """As `serve`, to read the streams of an existing run, whose launcher may still be running."""
        return cls.serve(config, run_dir, environ)


class LockedWriter(Generic[T]):
    """What writers have in common: the lock of the stream's folder, and the fault after which nothing can be written.

    Raises:
        StreamError: the stream has a writer already, or its folder cannot be created.
    """

    def __init__(self, name: str, directory: Path, record_type: Any) -> None:
        self._name, self._directory = name, directory
        self._codec = RecordCodec[T](record_type)
        self._mutex = threading.Lock()
        self._next = 0
        self._broken: str | None = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(directory / "writer.lock")
        except BlockingIOError as error:
            owner = str(error.strerror).removeprefix("locked by ")
            raise self._error(f"{owner} is already writing it. Stop it, or use another output_dir") from error
        except OSError as error:
            raise self._error(f"cannot be opened for writing: {error}") from error

    @property
    def next_offset(self) -> int:
        """Offset that the next record will get."""
        return self._next

    def close(self) -> None:
        """Release the stream to another writer. May be called twice."""
        self._lock.release()

    @contextmanager
    def _opening(self, fault: type[Exception]) -> Iterator[None]:
        """Closes the writer if the code inside fails; a `fault` becomes a StreamError."""
        try:
            yield
        except (fault, StreamError) as error:
            self.close()
            if isinstance(error, StreamError):
                raise
            raise self._error(f"cannot be opened for writing: {error}") from error

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise self._error(self._broken)

    def _error(self, reason: str) -> StreamError:
        return StreamError(f"stream {self._name}: {reason}")
