"""The stream contract: typed readers and writers, and the names of a run's streams.

Both backends pass one contract suite. A stream is an append-only log of records; a stream assigns each record a
gap-free `offset` from 0. One writer per (topic, instance); any number of readers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

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
POOL_TOPIC = "pool"
PASSES_TOPIC = "passes"

#: The launcher as a writer of streams.
LAUNCHER = "launch"


# Who reads a stream to the end and then no more: a record that they have taken need not stay in Redis. What is in no
# such stream is small.
PREPROCESSOR_CONSUMER = "preprocessor"
TRAINER_CONSUMER = "finetune"
CONSUMERS: dict[str, tuple[str, ...]] = {
    ACTOR_TOPIC: (PREPROCESSOR_CONSUMER,),
    TRAINING_DATA_TOPIC: (TRAINER_CONSUMER,),
}


class StreamSpec(msgspec.Struct, frozen=True):
    """Address of one log: `topic` says what flows, `instance` who writes (a job name), `partition` which share."""

    topic: str
    instance: str = "0"
    partition: int = 0


class Entry(msgspec.Struct, Generic[T], frozen=True):
    """One record with its offset."""

    offset: int
    record: T


class StreamWriter(Protocol[T_contra]):
    """Appends records. A record is visible to readers once `write` returned; `flush` makes it as durable as the
    config `streams.fsync` asks for. One process at a time may write a stream. Threads may share a writer."""

    def write(self, record: T_contra) -> int:
        """Append one record and return its offset. Raises StreamError if it cannot be written."""
        ...

    def flush(self) -> None: ...

    def end_waits(self) -> None:
        """From now on, raise NoRoom instead of waiting until a full stream has room. Any thread may call it."""
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
        """Let a `read` that blocks now, or else the next one, return at once, maybe with an empty list. Thread-safe."""
        ...

    def close(self) -> None: ...
