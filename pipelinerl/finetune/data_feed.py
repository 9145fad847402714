"""Reads the next `TrainingBatch`. Called by the loop of every rank; each rank reads the same records.

Rank 0 waits for the preprocessor, at most `timeout_s`, and says so in the heartbeat; the others wait for rank 0. So all
of them learn at the same place that the trainer is to stop, or that a server waits for weights.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from pipelinerl.errors import StreamError, WorkerError
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.records import TrainingBatch
from pipelinerl.streams.base import StreamReader


class Waiter(Protocol):
    """The part of the heartbeat that the trainer uses."""

    def waiting(self, what: str, deadline_s: float | None = None) -> AbstractContextManager[object]: ...

    def progress(self, n: int = 1) -> None: ...


class _News(enum.IntEnum):
    """Why the wait of rank 0 ended."""

    BATCH = 0
    STOP = 1
    SERVER = 2
    TIMEOUT = 3
    OVER = 4


class DataFeed:
    """Batches in the order of their steps.

    After a restart the batches behind the checkpoint are read again, and trained as they are: the stream holds one
    batch for every step, and the steps come out as they were.

    Args:
        reader: stream `training_data`, opened at the offset of the checkpoint.
        should_stop: asked before the wait and when it was woken: True ends it without a batch.
        ranks: of the trainer.
        server_waits: asked then, too: whether a server waits for weights.
        is_over: asked then, too: whether no batch follows that of the given step.
    """

    def __init__(
        self,
        reader: StreamReader[TrainingBatch],
        heartbeat: Waiter,
        timeout_s: float,
        should_stop: Callable[[], bool] = lambda: False,
        ranks: Ranks | None = None,
        server_waits: Callable[[], bool] = lambda: False,
        is_over: Callable[[int], bool] = lambda step: False,
    ) -> None:
        self._ends_behind = is_over
        #: Whether `next` gave no batch because none follows; the same on all ranks.
        self.is_over = False
        self._should_stop = should_stop
        self._server_waits = server_waits
        self._ranks = ranks or Ranks()
        self._batch: TrainingBatch | None = None
        self._reader = reader
        self._heartbeat = heartbeat
        self._timeout_s = timeout_s

    @property
    def offset(self) -> int:
        """Offset behind the last batch that was handed out."""
        return self._reader.offset

    def next(self, step: int, serve: Callable[[], None] = lambda: None) -> TrainingBatch | None:
        """The batch of `step`; None if the trainer is to stop, or if no batch follows: then `is_over` is set.

        Args:
            step: the step that the batch must be of.
            serve: called on every rank when a server waits for weights while there is no data.

        Raises:
            WorkerError: none came in time.
            StreamError: the next batch is of another step or is empty.
        """
        batch = self._read(step, serve)
        if batch is None:
            return None
        if batch.step != step:
            raise StreamError(
                f"training_data offset {self.offset - 1}: got the batch of step {batch.step}, expected step {step}"
            )
        if not batch.samples:
            raise StreamError(f"training_data offset {self.offset - 1}: the batch of step {step} has no samples")
        return batch

    def _read(self, step: int, serve: Callable[[], None]) -> TrainingBatch | None:
        while True:
            with self._heartbeat.waiting("training data", deadline_s=self._timeout_s):
                # Only rank 0's value counts.
                news = self._ranks.broadcast(int(self._wait(step) if self._ranks.is_first else _News.BATCH))
            if news in (_News.STOP, _News.OVER):
                self.is_over = news == _News.OVER
                return None
            if news == _News.BATCH:
                return self._take()
            if news == _News.TIMEOUT:
                raise self._no_data()
            serve()

    def _wait(self, step: int) -> _News:
        """Wait for the next batch, which is kept, or for something else to do."""
        end = time.monotonic() + self._timeout_s
        while True:
            if self._should_stop():
                return _News.STOP
            if self._server_waits():
                return _News.SERVER
            if self._ends_behind(step - 1):
                # It was said behind the last batch, so that is here if there is one.
                return _News.BATCH if self._fetch(0) else _News.OVER
            left_s = end - time.monotonic()
            if left_s <= 0:
                return _News.TIMEOUT
            if self._fetch(left_s):
                return _News.BATCH

    def _take(self) -> TrainingBatch:
        """The batch that rank 0 has and the others can read now."""
        if self._batch is None and not self._fetch(self._timeout_s):
            raise self._no_data()
        batch, self._batch = self._batch, None
        assert batch is not None
        return batch

    def _fetch(self, timeout_s: float) -> bool:
        entries = self._reader.read(timeout_s, max_records=1)
        if entries:
            self._batch = entries[0].record
        return bool(entries)

    def _no_data(self) -> WorkerError:
        return WorkerError(
            f"no training data for {self._timeout_s:g} s (supervise.progress_timeout_s): "
            "the preprocessor or the actor made no progress"
        )
