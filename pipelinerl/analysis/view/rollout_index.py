"""An index of the rollouts of one stream: a few numbers of each in NumPy columns, so that filters read nothing again.

The newest file of the stream is read first and then followed; older ones are added backwards by `fill`. Only heads are
decoded. A rollout takes about 25 bytes, a group 22.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from pipelinerl.analysis.select import places_in_group
from pipelinerl.records import EvaluationRollout, RolloutSummary, VersionSpan
from pipelinerl.tracking.token_text import escaped

Order = Literal["newest", "best", "worst"]

SUCCESS, CUT, HAS_SUCCESS, HAS_REWARD = 1, 2, 4, 8

_GROUP = np.dtype([("key", "i8"), ("problem", "i8"), ("dataset", "u2"), ("failed", "u2"), ("failure", "u2")])
_ROLLOUT = np.dtype(
    {
        "names": ["group", "place", "reward", "first", "last", "tokens", "is"],
        "formats": ["u4", "u2", "f4", "i4", "i4", "u4", "u1"],
    }
)


class SampleRow(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a `Sample`."""

    rollout_id: str = ""
    reward: float = 0.0
    output_tokens: int = 0
    finished: bool = True
    version_spans: list[VersionSpan] = []


class GroupRow(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a `Group`."""

    id: str
    samples: list[SampleRow]
    problem_id: str = ""
    dataset_name: str = ""
    rollouts: list[RolloutSummary] = []
    failed_rollouts: int = 0
    schema: int = 0


class EvaluationRow(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of an `EvaluationRollout`."""

    id: str
    group_id: str
    problem_id: str
    dataset_name: str
    due_version: int
    samples: list[SampleRow] = []
    summary: RolloutSummary | None = None
    failure: str = ""
    schema: int = 0


def key_of(name: str) -> int:
    """A number for an id. The page knows ids in their inert form only, so it is that of this form."""
    return hash(escaped(name))


@dataclass(frozen=True)
class Filter:
    """Which rollouts: everything that is not None must hold. `versions` and `reward` are (lowest, highest).

    `keys`: those of the groups that may be chosen (`key_of` of their ids), as the bytes of an array of int64.
    """

    versions: tuple[int, int] | None = None
    reward: tuple[float, float] | None = None
    group: str | None = None
    problem: str | None = None
    dataset: str | None = None
    success: bool | None = None
    is_cut: bool | None = None
    failure: str | None = None
    is_failed: bool = False
    keys: bytes | None = None


class Hit(NamedTuple):
    """One rollout: that at `place` of the record at `offset`. `reward` and `success` are None where it has none."""

    offset: int
    place: int
    dataset: str
    reward: float | None
    success: bool | None
    first_version: int
    last_version: int
    output_tokens: int
    is_cut: bool
    failure: str
    failed_attempts: int


class Rows:
    """A structured NumPy array that grows at its end. A view that was taken stays as it is."""

    def __init__(self, dtype: Any) -> None:
        self._rows = np.empty(0, dtype)
        self.count = 0

    def add(self, row: tuple[Any, ...]) -> None:
        if self.count == len(self._rows):
            self._rows = np.concatenate([self._rows, np.empty(256 + self.count // 4, self._rows.dtype)])
        self._rows[self.count] = row
        self.count += 1

    def view(self) -> NDArray[Any]:
        return self._rows[: self.count]

    def prepend(self, older: Rows) -> None:
        self._rows = np.concatenate([older.view(), self.view()])
        self.count = len(self._rows)


def _rollouts_pass(rows: NDArray[Any], wanted: Filter) -> NDArray[Any]:
    passes = np.ones(len(rows), bool)
    if wanted.versions is not None:
        passes &= (rows["first"] <= wanted.versions[1]) & (rows["last"] >= wanted.versions[0])
    if wanted.reward is not None:
        low, high = (np.float32(each) for each in wanted.reward)
        passes &= (rows["is"] & HAS_REWARD > 0) & (rows["reward"] >= low) & (rows["reward"] <= high)
    if wanted.success is not None:
        passes &= rows["is"] & (HAS_SUCCESS | SUCCESS) == (HAS_SUCCESS | SUCCESS * wanted.success)
    if wanted.is_cut is not None:
        passes &= (rows["is"] & CUT > 0) == wanted.is_cut
    return passes


def _groups_pass(groups: NDArray[Any], wanted: Filter, names: Names) -> NDArray[Any]:
    passes = np.ones(len(groups), bool)
    if wanted.group is not None:
        passes &= groups["key"] == key_of(wanted.group)
    if wanted.problem is not None:
        passes &= groups["problem"] == key_of(wanted.problem)
    if wanted.dataset is not None:
        passes &= groups["dataset"] == names.find(wanted.dataset)
    if wanted.failure is not None:
        passes &= groups["failure"] == names.find(wanted.failure)
    if wanted.is_failed:
        passes &= groups["failed"] > 0
    if wanted.keys is not None:
        passes &= np.isin(groups["key"], np.frombuffer(wanted.keys, "i8"))
    return passes


class Names:
    """Short texts that repeat (data sets, failures) as numbers; more than 65,534 of them share the last one.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = {"": 0}
        self._texts = [""]

    def number(self, text: str) -> int:
        text = escaped(text)
        with self._lock:
            number = self._numbers.get(text)
            if number is None:
                if len(self._texts) > np.iinfo("u2").max - 1:
                    return len(self._texts) - 1
                number = self._numbers[text] = len(self._texts)
                self._texts.append(text)
            return number

    def find(self, text: str) -> int:
        """As `number`; -1 for one that was never seen."""
        return self._numbers.get(text, -1)

    def text(self, number: int) -> str:
        return self._texts[number]


class RolloutIndex:
    """The rollouts of consecutive records. Thread-safe: one thread adds new ones, one fills in older ones."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._start = 0
        self._groups, self._rollouts = Rows(_GROUP), Rows(_ROLLOUT)
        self.names = Names()
        self._datasets: set[str] = set()
        self._failures: set[str] = set()

    @property
    def span(self) -> tuple[int, int]:
        """Offsets [first, last) of the records that are indexed."""
        with self._lock:
            return self._start, self._start + self._groups.count

    @property
    def num_rollouts(self) -> int:
        return self._rollouts.count

    @property
    def datasets(self) -> list[str]:
        """Names of the data sets, sorted."""
        with self._lock:
            return sorted(self._datasets)

    @property
    def failures(self) -> list[str]:
        """What rollouts of evaluations failed with, sorted."""
        with self._lock:
            return sorted(self._failures)

    def add(self, offset: int, record: GroupRow | EvaluationRow) -> None:
        """The newest record, which follows on the one before."""
        with self._lock:
            if not self._groups.count:
                self._start = offset
            self._note(record)
            self._add(self._groups, self._rollouts, record)

    def fill(self, entries: Iterator[Any]) -> None:
        """Records right before those that are indexed. They count once all are here."""
        groups, rollouts = Rows(_GROUP), Rows(_ROLLOUT)
        for entry in entries:
            with self._lock:
                self._note(entry.record)
            self._add(groups, rollouts, entry.record)
        with self._lock:
            if not self._groups.count and groups.count:
                self._start = entry.offset + 1
            self._start -= groups.count
            self._rollouts.view()["group"] += groups.count
            self._groups.prepend(groups)
            self._rollouts.prepend(rollouts)

    def _add(self, groups: Rows, rollouts: Rows, record: GroupRow | EvaluationRow) -> None:
        group, own = (
            _rows_of_group(record, self.names)
            if isinstance(record, GroupRow)
            else _rows_of_evaluation(record, self.names)
        )
        for rollout in own:
            rollouts.add((groups.count, *rollout))
        groups.add(group)

    def _note(self, record: GroupRow | EvaluationRow) -> None:
        self._datasets.add(escaped(record.dataset_name))
        if isinstance(record, EvaluationRow) and record.failure:
            self._failures.add(escaped(record.failure))

    def find(self, wanted: Filter, order: Order, below: int, skip: int, count: int) -> tuple[list[Hit], int]:
        """Rollouts `skip` to `skip + count` of those that pass, and how many pass in all.

        Args:
            wanted: the filters.
            order: the newest first, or by reward, of equal ones the newest first.
            below: only records before this offset, so that pages of a growing stream fit together.
            skip: how many to leave out.
            count: how many to return at most.
        """
        with self._lock:
            start, groups, rows = self._start, self._groups.view(), self._rollouts.view()
            passes = _rollouts_pass(rows, wanted) & _groups_pass(groups, wanted, self.names)[rows["group"]]
            found = np.flatnonzero(passes & (rows["group"] < max(0, below - start)))
            if order != "newest":
                rewards = rows["reward"][found].astype("f8") * (1 if order == "best" else -1)
                rewards[np.isnan(rewards)] = -np.inf
                # Sorting is stable, so after reversing the newest of equal rewards comes first.
                found = found[np.argsort(rewards, kind="stable")]
            chosen = found[::-1][skip : skip + count]
            return [self._hit(start, groups[rows[row]["group"]], rows[row]) for row in chosen], len(found)

    def at(self, offset: int, place: int) -> Hit:
        """The rollout at `place` of the indexed record at `offset`; KeyError: there is none."""
        with self._lock:
            start, groups, rows = self._start, self._groups.view(), self._rollouts.view()
            for row in np.flatnonzero((rows["group"] == offset - start) & (rows["place"] == place)):
                return self._hit(start, groups[offset - start], rows[row])
        raise KeyError(f"offset {offset}, place {place}")

    def _hit(self, start: int, group: Any, rollout: Any) -> Hit:
        flags = int(rollout["is"])
        return Hit(
            offset=start + int(rollout["group"]),
            place=int(rollout["place"]),
            dataset=self.names.text(int(group["dataset"])),
            reward=float(f"{rollout['reward']:.6g}") if flags & HAS_REWARD else None,
            success=bool(flags & SUCCESS) if flags & HAS_SUCCESS else None,
            first_version=int(rollout["first"]),
            last_version=int(rollout["last"]),
            output_tokens=int(rollout["tokens"]),
            is_cut=bool(flags & CUT),
            failure=self.names.text(int(group["failure"])),
            failed_attempts=int(group["failed"]),
        )


def _rows_of_group(group: GroupRow, names: Names) -> tuple[tuple[Any, ...], Iterator[tuple[Any, ...]]]:
    failed = min(group.failed_rollouts, 65535)
    own = (key_of(group.id), key_of(group.problem_id), names.number(group.dataset_name), failed, 0)
    return own, _rollouts_of_group(group)


def _rollouts_of_group(group: GroupRow) -> Iterator[tuple[Any, ...]]:
    summaries = {each.rollout_id: each for each in group.rollouts}
    samples: dict[str, list[SampleRow]] = {}
    for sample in group.samples:
        samples.setdefault(sample.rollout_id, []).append(sample)
    for place, rollout_id in enumerate(places_in_group(group)):
        own = samples.get(rollout_id, [])
        versions = [span.version for sample in own for span in sample.version_spans]
        yield place, *_numbers(summaries.get(rollout_id), own, versions)


def _rows_of_evaluation(
    rollout: EvaluationRow | EvaluationRollout, names: Names
) -> tuple[tuple[Any, ...], Iterator[tuple[Any, ...]]]:
    own = (
        key_of(rollout.group_id),
        key_of(rollout.problem_id),
        names.number(rollout.dataset_name),
        int(bool(rollout.failure)),
        names.number(rollout.failure),
    )
    return own, iter([(0, *_numbers(rollout.summary, rollout.samples, [rollout.due_version]))])


def _numbers(summary: RolloutSummary | None, samples: list[Any], versions: list[int]) -> tuple[Any, ...]:
    """(reward, first version, last version, tokens, flags)."""
    cut = CUT * any(not sample.finished for sample in samples)
    low, high = (min(versions), max(versions)) if versions else (-1, -1)
    if summary is not None:
        tokens = sum(sample.output_tokens for sample in samples) or summary.output_tokens
        flags = HAS_REWARD | HAS_SUCCESS | (SUCCESS * summary.success) | (CUT if summary.num_cut else cut)
        return summary.reward, low, high, tokens, flags
    tokens = sum(sample.output_tokens for sample in samples)
    if not samples:
        return 0.0, low, high, tokens, cut
    return sum(sample.reward for sample in samples) / len(samples), low, high, tokens, cut | HAS_REWARD
