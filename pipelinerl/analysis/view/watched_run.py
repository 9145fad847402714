"""A run that `view` shows: follows its streams and keeps its numbers and an index of its rollouts.

Nothing is read twice: numbers go into a `RunState`, rollouts into `RolloutIndex`es, fates into columns. A stream that
cannot be read further is named in `faults`; the others continue.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

from pipelinerl.analysis.select import Evaluations, StoredGroup, fate_text
from pipelinerl.analysis.view.rollout_index import EvaluationRow, GroupRow, RolloutIndex, Rows, key_of
from pipelinerl.errors import StreamError, UserError
from pipelinerl.records import (
    FATES,
    EvaluationResult,
    EvaluationRollout,
    FateRecord,
    MetricRecord,
    StepDone,
    TokenRatios,
    TrainerMessage,
)
from pipelinerl.run.status import RunStatus, status_of
from pipelinerl.streams.base import (
    ACTOR,
    ACTOR_TOPIC,
    EVALUATION_ROLLOUTS_TOPIC,
    EVALUATION_TOPIC,
    FATES_TOPIC,
    METRICS_TOPIC,
    PREPROCESSOR,
    TOKEN_RATIOS_TOPIC,
    TRAINER,
    TRAINER_TOPIC,
)
from pipelinerl.streams.open_run import find_run, open_streams
from pipelinerl.streams.read import Feed, read_entries, read_one
from pipelinerl.tracking.state import RunState
from pipelinerl.tracking.token_text import TokenText, token_text

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Source = Literal["training", "evaluation"]

TOPICS: dict[Source, tuple[str, Any, Any]] = {
    "training": (ACTOR_TOPIC, GroupRow, StoredGroup),
    "evaluation": (EVALUATION_ROLLOUTS_TOPIC, EvaluationRow, EvaluationRollout),
}
_FATE = np.dtype(
    {
        "names": ["key", "offset", "source", "trained", "version", "start"],
        "formats": ["i8", "u4", "u1", "?", "i4", "u2"],
    }
)
_RECORDERS = (TRAINER, PREPROCESSOR, ACTOR)
_STATUS_S = 1.0


class _RatiosHead(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a `TokenRatios`."""

    step: int
    incarnation: int = 0
    schema: int = 0


#: Older rollouts are read after what a page shows first, curves and the newest rollouts.
HEAD_START_S = 1.0


class WatchedRun:
    """The run in `folder`, from the moment of `start` until `close`.

    Raises:
        ConfigError: it is not the directory of a run, or its streams cannot be reached.
        StreamError: it has no streams.
    """

    def __init__(self, folder: str | Path) -> None:
        self._lock = threading.RLock()
        self._stack = ExitStack()
        self.run = find_run(folder)
        self._identity = self._identity_time()
        self.streams = self._stack.enter_context(open_streams(self.run))
        self.index: dict[Source, RolloutIndex] = {"training": RolloutIndex(), "evaluation": RolloutIndex()}
        self.evaluations = Evaluations()
        self.reasons: Counter[tuple[str, str]] = Counter()
        self.faults: dict[str, str] = {}
        self._changes = 0
        self._state = RunState(self.run.identity.incarnation)
        self._step_times: dict[int, float] = {}
        self._fates = Rows(_FATE)
        self._status_lock = threading.Lock()
        self._status: tuple[float, RunStatus] | None = None
        self._decoder_lock = threading.Lock()
        self._decoder: tuple[TokenText | None, str] | None = None
        self._feeds: list[Feed[Any]] = []
        self._stopping = threading.Event()
        self._is_patient = True
        self._older: list[threading.Thread] = []

    @property
    def name(self) -> str:
        return self.run.run_dir.root.name

    @property
    def changes(self) -> int:
        """Grows with everything that is read."""
        with self._lock:
            return self._changes

    def start(self) -> WatchedRun:
        """Follow the streams in threads: curves first, then the newest rollouts, then older ones."""
        for source in _RECORDERS:
            self._follow(METRICS_TOPIC, source, MetricRecord, self._on_metrics)
        self._follow(TRAINER_TOPIC, TRAINER, TrainerMessage, self._on_trainer)
        self._follow(EVALUATION_TOPIC, ACTOR, EvaluationResult, self._on_evaluation)
        for place in TOPICS:
            self._index(place)
        for number, source in enumerate(_RECORDERS):
            self._follow(FATES_TOPIC, source, FateRecord, self._on_fate(number))
        return self

    def read_all(self) -> None:
        """Instead of `start`: read what is there now without following it."""
        self._is_patient = False
        self.start()
        self._end_feeds()

    def close(self) -> None:
        """End the threads and release the streams."""
        self._stopping.set()
        self._end_feeds()
        self._stack.close()

    def _end_feeds(self) -> None:
        for thread in self._older:
            thread.join()
        for feed in self._feeds:
            try:
                feed.stop()
            except (StreamError, OSError) as error:
                logger.debug("already known as a fault: %s", error)

    def read(self, read: Callable[[RunState], Result]) -> Result:
        """`read(state)`; nothing changes the state meanwhile."""
        with self._lock:
            return read(self._state)

    def status(self) -> RunStatus:
        """State of the run and its processes, at most a second old."""
        now = time.monotonic()
        # Reads files of all processes, so the feeds must not wait for it.
        with self._status_lock:
            if self._status is None or now - self._status[0] > _STATUS_S:
                self._notice_restart()
                step, step_time = self.read(lambda state: (state.steps, self._step_times.get(state.steps)))
                self._status = now, status_of(self.run, step, step_time)
            return self._status[1]

    def decoder(self) -> tuple[TokenText | None, str]:
        """The tokenizer of the run, or None and the reason."""
        with self._decoder_lock:
            if self._decoder is None:
                self._decoder = token_text(self.run.config, self.run.run_dir)
            return self._decoder

    def indexed_share(self, source: Source) -> float:
        """Share of a stream's records that are indexed, by offsets."""
        first, last = self.index[source].span
        return 1.0 if not any(thread.is_alive() for thread in self._older) or not last else (last - first) / last

    def keys_of_steps(self, first: int, last: int) -> bytes:
        """Keys of the groups that were trained in optimizer steps `first` to `last`, for `Filter.keys`."""
        with self._lock:
            rows = self._fates.view()
            rows = rows[rows["trained"] & (rows["version"] >= first) & (rows["version"] <= last)]
            pairs, of_row = np.unique(rows[["start", "version"]], return_inverse=True)
            counts = [self._state.lineage.survives(int(start), int(version)) for start, version in pairs]
        return np.unique(rows["key"][np.array(counts, bool)[of_row]]).tobytes()

    def fates_of_group(self, group_id: str) -> tuple[dict[str, str], int | None]:
        """The fates of a group's samples, by id, as text; and the step that trained it, if any."""
        with self._lock:
            rows = self._fates.view()
            rows = rows[rows["key"] == key_of(group_id)].copy()
            lineage = self._state.lineage
            trained = [(int(row["start"]), int(row["version"])) for row in rows if row["trained"]]
            step = max((version for start, version in trained if lineage.survives(start, version)), default=None)
        found: dict[str, str] = {}
        for row in rows:
            record = self.record(FATES_TOPIC, _RECORDERS[row["source"]], FateRecord, int(row["offset"]))
            with self._lock:
                text = fate_text(record, lineage) if record is not None and record.group_id == group_id else None
            if text:
                found.update((name, text) for name in record.sample_ids)
        return found, step

    def record(self, topic: str, instance: str, kind: Any, offset: int) -> Any:
        """The record at `offset`; None: it is gone."""
        return read_one(self.streams, topic, instance, kind, offset)

    def log_ratios(self, step: int, sample_id: str) -> list[float]:
        """log pi - log mu of the trained tokens of a sample, pi under the weights that `step` trained; empty: not
        recorded."""
        start = self.read(lambda state: state.lineage.incarnation_of(step))
        # Earlier starts may have had other ranks. These records are always files.
        for rank in sorted(folder.name for folder in (self.run.run_dir.streams / TOKEN_RATIOS_TOPIC).glob("*")):
            record = self.record(TOKEN_RATIOS_TOPIC, rank, TokenRatios, self._ratios_offset(rank, start, step))
            if record is None or (record.incarnation, record.step) != (start, step):
                continue
            if found := _ratios_of(record, sample_id):
                return found
        return []

    def _ratios_offset(self, rank: str, start: int, step: int) -> int:
        """Offset of a rank's first record that is not before `step` of `start`, by binary search: there is one record
        per step, in order of starts and steps."""

        def is_reached(offset: int) -> bool:
            head = self.record(TOKEN_RATIOS_TOPIC, rank, _RatiosHead, offset)
            return head is None or (head.incarnation, head.step) >= (start, step)

        end = 1
        while not is_reached(end - 1):
            end *= 2
        return bisect_left(range(end), True, key=is_reached)

    def _follow(self, topic: str, instance: str, kind: Any, take: Callable[[Any], None], start: int = 0) -> None:
        name = f"{topic}/{instance}"

        def listener(entry: Any) -> None:
            with self._lock:
                take(entry)
                self._changes += 1

        def failed(error: BaseException) -> None:
            with self._lock:
                self.faults[name] = str(error)

        reader = self.streams.reader(topic, instance, kind, start)
        self._feeds.append(Feed(reader, listener, name, failed).start())

    def _index(self, source: Source) -> None:
        topic, kind, _ = TOPICS[source]
        places = self.streams.places(topic, ACTOR) or [0]
        index = self.index[source]
        self._follow(topic, ACTOR, kind, lambda entry: index.add(entry.offset, entry.record), places[-1])
        older = threading.Thread(target=self._fill, args=(source, places), name=f"index-{source}", daemon=True)
        self._older.append(older)
        older.start()

    def _fill(self, source: Source, places: list[int]) -> None:
        topic, kind, _ = TOPICS[source]

        def entries(first: int, end: int) -> Iterator[Any]:
            for entry in read_entries(self.streams, topic, ACTOR, kind, first, end):
                if self._stopping.is_set():
                    return
                yield entry

        try:
            if self._is_patient and self._stopping.wait(HEAD_START_S):
                return
            for first, end in zip(reversed(places[:-1]), reversed(places[1:]), strict=True):
                self.index[source].fill(entries(first, end))
                with self._lock:
                    self._changes += 1
                if self._stopping.is_set():
                    return
        except (UserError, StreamError, OSError) as error:
            with self._lock:
                self.faults[f"{topic}/{ACTOR}"] = str(error)

    def _on_metrics(self, entry: Any) -> None:
        self._state.fold_metrics(entry.record)

    def _on_trainer(self, entry: Any) -> None:
        self._state.fold_trainer(entry.record)
        if isinstance(entry.record, StepDone):
            self._step_times[entry.record.step] = entry.record.time

    def _on_evaluation(self, entry: Any) -> None:
        result: EvaluationResult = entry.record
        self._state.fold_evaluation(result)
        if result.success_rate is not None:
            self.evaluations.made.setdefault((result.due_version, result.is_final), set()).add(result.incarnation)

    def _on_fate(self, source: int) -> Callable[[Any], None]:
        def take(entry: Any) -> None:
            record: FateRecord = entry.record
            self._state.fold_fate(record)
            if record.fate == FATES[-1]:  # pending
                return
            if record.fate != "trained":
                self.reasons[record.fate, record.reason] += max(len(record.sample_ids), record.num_rollouts)
            start, trained = min(record.incarnation, 65535), record.fate == "trained"
            self._fates.add((key_of(record.group_id), entry.offset, source, trained, record.version, start))

        return take

    def _notice_restart(self) -> None:
        """A resumed run may have other processes."""
        with suppress(OSError, UserError):  # the folder was moved: keep what was read
            if (identity := self._identity_time()) != self._identity:
                self._identity, self.run = identity, find_run(self.run.run_dir.root)

    def _identity_time(self) -> int:
        return self.run.run_dir.identity_file.stat().st_mtime_ns


def _ratios_of(record: TokenRatios, sample_id: str) -> list[float]:
    if sample_id not in record.sample_ids:
        return []
    place = record.sample_ids.index(sample_id)
    start, length = sum(record.lengths[:place]), record.lengths[place]
    values = np.frombuffer(record.log_ratios.data, record.log_ratios.dtype)[start : start + length]
    return [float(value) for value in values]
