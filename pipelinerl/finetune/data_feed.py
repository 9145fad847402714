"""The wait for the next batch and what else ends it: SIGTERM, a server without weights, the last pass, an evaluation
that reached the target.

All ranks read the same records. Rank 0 waits for the preprocessor and the others wait for rank 0, so all ranks decide
the same at the same step.
"""

from __future__ import annotations

import enum
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pipelinerl.errors import StreamError, WorkerError
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.records import EvaluationResult, PassesOver, TrainingBatch
from pipelinerl.rundir.heartbeat import Heartbeat
from pipelinerl.streams.base import Entry, StreamReader
from pipelinerl.streams.read import Feed

if TYPE_CHECKING:
    from pipelinerl.finetune.weight_sync import WeightSync

_TERM, _QUIT = b"t", b"q"


class StopRequest:
    """Whether this rank was asked to stop, and whether any rank was."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.requested = False

    def agreed(self) -> bool:
        """True on every rank if any rank was asked to stop. All ranks must call it at the same place."""
        return self._ranks.max([float(self.requested)])[0] > 0


@contextmanager
def stop_on_sigterm(request: StopRequest, wake: Callable[[], None]) -> Iterator[None]:
    """Set `request` and call `wake` when SIGTERM arrives. Does nothing outside the main thread.

    The handler only writes a byte into a pipe; a thread does the rest, because `wake` takes locks.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    read_end, write_end = os.pipe()

    def listen() -> None:
        if os.read(read_end, 1) == _TERM:
            request.requested = True
            wake()

    thread = threading.Thread(target=listen, name="stop-request", daemon=True)
    thread.start()
    before = signal.signal(signal.SIGTERM, lambda *_: os.write(write_end, _TERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        os.write(write_end, _QUIT)
        thread.join()
        os.close(read_end)
        os.close(write_end)


class PassesEnd:
    """Follows the stream `passes` in a thread: the step after which the passes leave nothing to train.

    Args:
        max_epochs: of this start. Records for fewer passes are ignored.
        wake: called when a record arrives or the thread fails.
    """

    def __init__(self, reader: StreamReader[PassesOver], max_epochs: int, wake: Callable[[], None]) -> None:
        self._max_epochs = max_epochs
        self._wake = wake
        self._steps: set[int] = set()
        self._feed = Feed(reader, self._take, "passes", lambda _: wake()).start()

    def is_after(self, step: int) -> bool:
        """Whether no batch follows that of `step`. Raises what the thread failed with."""
        self._feed.raise_if_failed()
        return step in self._steps

    def close(self) -> None:
        self._feed.stop()

    def _take(self, entry: Entry[PassesOver]) -> None:
        if entry.record.max_epochs >= self._max_epochs:
            self._steps.add(entry.record.step)
            self._wake()


class TargetReached:
    """Follows the stream `evaluation` in a thread: whether an evaluation had the success rate that ends training.

    Evaluations of earlier starts count once their version is trained: a run that reached its target is complete, but
    one that resumes from before that version repeats the steps up to it. They are the same steps, so the actor does not
    repeat the evaluation.

    Args:
        wake: called when a version reaches it or the thread fails.
    """

    def __init__(self, reader: StreamReader[EvaluationResult], target: float, wake: Callable[[], None]) -> None:
        self._target = target
        self._wake = wake
        self._last: tuple[int, int, bool] | None = None
        self._first_version: int | None = None
        self._feed = Feed(reader, self._take, "evaluation", lambda _: wake()).start()

    def is_reached(self, step: int) -> bool:
        """Whether a version up to `step`, the last one trained, has the rate. Raises what the thread failed with."""
        self._feed.raise_if_failed()
        return self._first_version is not None and self._first_version <= step

    def close(self) -> None:
        self._feed.stop()

    def _take(self, entry: Entry[EvaluationResult]) -> None:
        result = entry.record
        # The first result of an evaluation is over all its data sets.
        evaluation = (result.incarnation, result.due_version, result.is_final)
        is_first, self._last = evaluation != self._last, evaluation
        if is_first and result.success_rate is not None and result.success_rate >= self._target:
            # The version that the evaluation began with, as for the best model.
            known = self._first_version
            self._first_version = result.min_version if known is None else min(known, result.min_version)
            self._wake()


class _News(enum.IntEnum):
    """Why the wait of rank 0 ended."""

    BATCH = 0
    STOP = 1
    SERVER = 2
    TIMEOUT = 3
    OVER = 4


class DataFeed:
    """Batches in the order of their steps.

    The stream holds one batch per step; after a restart those after the checkpoint are trained again unchanged.

    Args:
        reader: stream `training_data`, opened at the offset of the checkpoint.
        weights: interrupts the wait when a server needs weights.
        passes: ends the wait when no batch follows (rank 0).
        target: ends training when it is reached (rank 0).
    """

    def __init__(
        self,
        reader: StreamReader[TrainingBatch],
        heartbeat: Heartbeat,
        timeout_s: float,
        ranks: Ranks,
        stop: StopRequest,
        weights: WeightSync | None = None,
        passes: PassesEnd | None = None,
        target: TargetReached | None = None,
    ) -> None:
        #: Whether training is over, the same on all ranks: no batch follows, or the target is reached.
        self.is_over = False
        self._reader = reader
        self._heartbeat = heartbeat
        self._timeout_s = timeout_s
        self._ranks = ranks
        self._stop = stop
        self._weights = weights
        self._passes = passes
        self._target = target
        self._batch: TrainingBatch | None = None

    @property
    def offset(self) -> int:
        """Offset after the last batch that was handed out."""
        return self._reader.offset

    def next(self, step: int, serve: Callable[[int], None]) -> TrainingBatch | None:
        """The batch of `step`; None if the trainer is to stop, or if no batch follows (then `is_over` is set).

        Args:
            serve: called on all ranks with version step - 1 if a server needs weights while there is no batch.

        Raises:
            WorkerError: no batch came in time.
            StreamError: the next batch is empty or of another step.
        """
        while True:
            with self._heartbeat.waiting("training data", deadline_s=self._timeout_s):
                # Only rank 0's value counts.
                news = self._ranks.broadcast(int(self._wait(step) if self._ranks.is_first else _News.BATCH))
            if news == _News.BATCH:
                return self._checked(self._take(), step)
            if news == _News.SERVER:
                serve(step - 1)
            elif news == _News.TIMEOUT:
                raise self._no_data()
            else:
                self.is_over = news == _News.OVER
                return None

    def _checked(self, batch: TrainingBatch, step: int) -> TrainingBatch:
        place = f"training_data offset {self.offset - 1}"
        if batch.step != step:
            raise StreamError(f"{place}: got the batch of step {batch.step}, expected step {step}")
        if not batch.samples:
            raise StreamError(f"{place}: the batch of step {step} has no samples")
        return batch

    def _wait(self, step: int) -> _News:
        """Wait for the next batch, which is kept, or another event."""
        end = time.monotonic() + self._timeout_s
        while True:
            if self._stop.requested:
                return _News.STOP
            if self._weights is not None and self._weights.has_fresh:
                return _News.SERVER
            if self._target is not None and self._target.is_reached(step - 1):
                return _News.OVER
            if self._passes is not None and self._passes.is_after(step - 1):
                # Written after the last batch, so that batch is readable if there is one.
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
            "neither the preprocessor nor the actor made progress"
        )
