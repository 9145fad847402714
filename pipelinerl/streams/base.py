"""The stream contract: names of a run's streams, writers, readers, and what a backend has to provide.

A stream is an append-only log of records with gap-free offsets from 0. One writer per (topic, instance, partition),
any number of readers. Every backend passes tests/contract/test_streams.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import msgspec

from pipelinerl.config.resources import StreamsConfig
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

# Each of these reads its stream once, from the start to the end of the run: a backend with bounded memory may drop what
# they have read. Streams without a consumer are small.
PREPROCESSOR_CONSUMER = "preprocessor"
TRAINER_CONSUMER = "finetune"
CONSUMERS: dict[str, tuple[str, ...]] = {
    ACTOR_TOPIC: (PREPROCESSOR_CONSUMER,),
    TRAINING_DATA_TOPIC: (TRAINER_CONSUMER,),
}


class StreamSpec(msgspec.Struct, frozen=True):
    """Address of one log: `topic` says what flows, `instance` who writes (a job name), `partition` which share.

    `policy` is empty while a run trains one policy; the streams of another one are named `topic@policy`.
    """

    topic: str
    instance: str = "0"
    partition: int = 0
    policy: str = ""

    @property
    def name(self) -> str:
        return f"{self.topic}@{self.policy}" if self.policy else self.topic


class Entry(msgspec.Struct, Generic[T], frozen=True):
    """One record with its offset."""

    offset: int
    record: T


class StreamWriter(Protocol[T_contra]):
    """Appends records. A record is visible to readers once `write` has returned; `flush` makes it as durable as
    `streams.fsync` asks for. Threads may share a writer."""

    @property
    def next_offset(self) -> int: ...

    def write(self, record: T_contra) -> int:
        """Append one record and return its offset. Raises StreamError if it cannot be written."""
        ...

    def flush(self) -> None: ...

    def end_waits(self) -> None:
        """From now on, raise NoRoom instead of waiting until a full stream has room. Thread-safe."""
        ...

    def close(self) -> None: ...


class StreamReader(Protocol[T]):
    """Reads records in order from `offset` (the next one to be returned). One thread reads; any may call `wake`."""

    @property
    def offset(self) -> int: ...

    def read(self, timeout_s: float, max_records: int = 256) -> Sequence[Entry[T]]:
        """Return 1..max_records entries, blocking up to `timeout_s` for the first; an empty list means time-out.

        Raises StreamError with file or key, offset and reason for a corrupt record.
        """
        ...

    def wake(self) -> None:
        """Let the `read` that blocks now, or else the next one, return at once, maybe empty. Thread-safe."""
        ...

    def close(self) -> None: ...


class StreamBackend(Protocol):
    """Where the streams of one run are kept. A backend is a class named in `STREAM_BACKENDS` (config/resources.py).

    Class methods are about a run as a whole: `check` before it starts, `serve` while it runs, `reopen` for commands
    that look at it from another process.
    """

    #: Whether the records lie in files of the run directory, readable while no run is active.
    is_on_disk: ClassVar[bool]
    #: Whether `write` and `flush` may take long.
    may_wait: bool

    def __init__(self, config: StreamsConfig, root: Path, run_id: str, environ: Mapping[str, str]) -> None:
        """Raises StreamError if the streams cannot be reached. `root` is the run's folder `streams`."""

    def writer(self, spec: StreamSpec, record_type: Any, consumers: Sequence[str]) -> StreamWriter[Any]:
        """`consumers` are the readers that it must not run too far ahead of."""
        ...

    def reader(self, spec: StreamSpec, record_type: Any, offset: int, consumer: str | None) -> StreamReader[Any]: ...

    def places(self, spec: StreamSpec) -> list[int]:
        """Ascending offsets from which a reader can start cheaply, the oldest record's first. Creates nothing."""
        ...

    def commit(self, spec: StreamSpec, offset: int) -> None:
        """No resume reads whole records before `offset`: with `streams.retention=heads` their tokens may go."""
        ...

    @classmethod
    def check(cls, config: StreamsConfig, environ: Mapping[str, str], num_nodes: int) -> None:
        """Raise UserError if a run cannot use this backend."""

    @classmethod
    def serve(
        cls, config: StreamsConfig, run_dir: RunDir, environ: Mapping[str, str]
    ) -> AbstractContextManager[Mapping[str, str]]:
        """Keep whatever the streams need running. Yields `environ` with what the run's processes need to find it."""
        ...

    @classmethod
    def reopen(
        cls, config: StreamsConfig, run_dir: RunDir, environ: Mapping[str, str], is_running: bool
    ) -> AbstractContextManager[Mapping[str, str]]:
        """As `serve`, to read the streams of an existing run, whose launcher may still be running."""
        ...
