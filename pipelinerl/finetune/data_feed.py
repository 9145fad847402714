"""Reads the next `TrainingBatch`. Called by the loop of every rank; each rank reads the same records.

Waits for the preprocessor, at most `timeout_s`, and says so in the heartbeat.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from pipelinerl.errors import StreamError, WorkerError
from pipelinerl.records import TrainingBatch
from pipelinerl.streams.base import StreamReader


class Waiter(Protocol):
    """The part of the heartbeat that the trainer uses."""

    def waiting(self, what: str, deadline_s: float | None = None) -> AbstractContextManager[object]: ...

    def progress(self, n: int = 1) -> None: ...


class DataFeed:
    """Batches in the order of their steps.

    After a restart the batches behind the checkpoint are read again, and trained as they are: the stream holds one
    batch for every step, and the steps come out as they were.

    Args:
        reader: stream `training_data`, opened at the offset of the checkpoint.
        should_stop: asked before the wait and when it was woken: True ends it without a batch.
    """

    def __init__(
        self,
        reader: StreamReader[TrainingBatch],
        heartbeat: Waiter,
        timeout_s: float,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._should_stop = should_stop
        self._reader = reader
        self._heartbeat = heartbeat
        self._timeout_s = timeout_s

    @property
    def offset(self) -> int:
        """Offset behind the last batch that was handed out."""
        return self._reader.offset

    def next(self, step: int) -> TrainingBatch | None:
        """The batch of `step`; None if the trainer is to stop.

        Raises:
            WorkerError: none came in time.
            StreamError: the next batch is of another step or is empty.
        """
        batch = None if self._should_stop() else self._read()
        if batch is None:
            return None
        if batch.step != step:
            raise StreamError(
                f"training_data offset {self.offset - 1}: got the batch of step {batch.step}, expected step {step}"
            )
        if not batch.samples:
            raise StreamError(f"training_data offset {self.offset - 1}: the batch of step {step} has no samples")
        return batch

    def _read(self) -> TrainingBatch | None:
        with self._heartbeat.waiting("training data", deadline_s=self._timeout_s):
            entries = self._reader.read(self._timeout_s, max_records=1)
        if not entries and self._should_stop():
            return None
        if not entries:
            raise WorkerError(
                f"no training data for {self._timeout_s:g} s (supervise.progress_timeout_s): "
                "the preprocessor or the actor made no progress"
            )
        return entries[0].record
