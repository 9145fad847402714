"""Selects recorded rollouts of training or evaluation by position, reward, data set, version, step or id.

Only heads are decoded for the selection, then the selected groups, one at a time. The newest rollouts are found from
the end of the stream. Works on running runs; never waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import islice
from typing import Any, Literal

import msgspec

from pipelinerl.errors import ConfigError, StreamError
from pipelinerl.records import (
    BatchHead,
    EvaluationResult,
    EvaluationRollout,
    FateRecord,
    Group,
    GroupHead,
    RolloutHead,
    RolloutSummary,
    Sample,
    SampleHead,
    TrainerMessage,
    VersionSpan,
)
from pipelinerl.records.lineage import Lineage
from pipelinerl.streams.base import (
    ACTOR,
    ACTOR_TOPIC,
    EVALUATION_ROLLOUTS_TOPIC,
    EVALUATION_TOPIC,
    FATES_TOPIC,
    PREPROCESSOR,
    TRAINER,
    TRAINER_TOPIC,
    TRAINING_DATA_TOPIC,
)
from pipelinerl.streams.hub import StreamHub
from pipelinerl.streams.read import read_all, read_entries, read_one


class StoredSample(Sample, frozen=True, kw_only=True):
    """A `Sample` whose tokens may have been removed (`streams.retention=heads`): then there are none."""

    input_ids: list[int] = []
    labels: list[int] = []
    logprobs: list[float] = []


class StoredGroup(Group, frozen=True, kw_only=True):
    samples: list[StoredSample]  # type: ignore[assignment]


class StoredRollout(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt, with what is known of its group. `summary` is None for samples that no rollout of it names."""

    group: StoredGroup
    rollout_id: str
    summary: RolloutSummary | None
    samples: list[StoredSample]


def rollout_of(group: StoredGroup, rollout_id: str) -> StoredRollout:
    """The rollout `rollout_id` of `group`."""
    summary = next((each for each in group.rollouts if each.rollout_id == rollout_id), None)
    own = [sample for sample in group.samples if sample.rollout_id == rollout_id]
    return StoredRollout(group=group, rollout_id=rollout_id, summary=summary, samples=own)


def places_in_group(group: Any) -> list[str]:
    """Ids of the rollouts of a group (or its head) by place: those with a summary, then those that only samples
    name."""
    names = [*(each.rollout_id for each in group.rollouts), *(each.rollout_id for each in group.samples)]
    return list(dict.fromkeys(names))


Order = Literal["last", "first", "best", "worst"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One rollout: the record at `offset` of the stream, its place in it, and what it is chosen by."""

    offset: int
    place: int
    rollout_id: str
    reward: float
    sample_ids: tuple[str, ...]


@dataclass(frozen=True)
class Evaluations:
    """Evaluations that have a result: by due version and whether it was the final one, the starts of the run that made
    it."""

    made: dict[tuple[int, bool], set[int]] = field(default_factory=dict)

    def has_result(self, rollout: EvaluationRollout) -> bool:
        return rollout.incarnation in self.made.get((rollout.due_version, rollout.is_final), ())

    def is_repeated(self, rollout: EvaluationRollout) -> bool:
        """Whether its evaluation was cut off and made again."""
        return (rollout.due_version, rollout.is_final) in self.made and not self.has_result(rollout)


@dataclass(frozen=True)
class Wanted:
    """Which rollouts: the filters, all of which must hold, then `count` of what is left (None: all) in `order`.

    `name` is the id of a group, a rollout or a sample; `sample_ids` are those of one optimizer step. With `evaluations`
    they are rollouts of evaluations instead of training: `version` is then the one that an evaluation was due at,
    `only_failed` and `no_success` (which includes failed ones) filter them by their end.
    """

    order: Order = "last"
    count: int | None = 3
    dataset: str | None = None
    version: int | None = None
    name: str | None = None
    sample_ids: frozenset[str] | None = None
    evaluations: Evaluations | None = None
    only_failed: bool = False
    no_success: bool = False

    def rollouts(self, offset: int, group: GroupHead) -> Iterator[Candidate]:
        """The rollouts of `group` that pass the filters, in its order."""
        if self.dataset is not None and group.dataset_name != self.dataset:
            return
        by_rollout: dict[str, list[SampleHead]] = {rollout_id: [] for rollout_id in places_in_group(group)}
        for sample in group.samples:
            by_rollout[sample.rollout_id].append(sample)
        rewards = {rollout.rollout_id: rollout.reward for rollout in group.rollouts}
        for place, (rollout_id, samples) in enumerate(by_rollout.items()):
            versions = {span.version for sample in samples for span in sample.version_spans}
            ids = tuple(sample.id for sample in samples)
            if (
                (self.version is None or self.version in versions)
                and (self.name is None or self.name in (group.id, rollout_id, *ids))
                and (self.sample_ids is None or not self.sample_ids.isdisjoint(ids))
            ):
                reward = rewards.get(rollout_id)
                if reward is None:
                    reward = sum(sample.reward for sample in samples) / len(samples)
                yield Candidate(offset, place, rollout_id, reward, ids)

    def accepts(self, rollout: EvaluationRollout, evaluations: Evaluations) -> bool:
        """Whether a rollout of an evaluation passes the filters on its end."""
        if self.order in ("best", "worst") and rollout.summary is None:
            return False  # no reward
        if self.only_failed and not rollout.failure:
            return False
        if self.no_success and rollout.summary is not None and rollout.summary.success:
            return False
        return self.name is not None or not evaluations.is_repeated(rollout)


@dataclass
class Seen:
    """What was searched, for the message when nothing was found. `versions` are the lowest and the highest."""

    groups: int = 0
    datasets: set[str] = field(default_factory=set)
    versions: tuple[int, int] | None = None

    def add(self, group: GroupHead) -> None:
        self.groups += 1
        self.datasets.add(group.dataset_name)
        for sample in group.samples:
            for span in sample.version_spans:
                low, high = self.versions or (span.version, span.version)
                self.versions = min(low, span.version), max(high, span.version)


def choose(streams: StreamHub, wanted: Wanted) -> tuple[list[Candidate], Seen]:
    """The rollouts that `wanted` asks for, and what was searched for them.

    By reward, the best or the worst comes first, of equal ones the newest; otherwise they are in stream order.

    Raises:
        StreamError: a record cannot be read, with file, offset and reason.
    """
    seen = Seen()
    places = streams.places(ACTOR_TOPIC if wanted.evaluations is None else EVALUATION_ROLLOUTS_TOPIC, ACTOR)
    if not places:
        return [], seen
    count = wanted.count
    if wanted.order == "last" and count is not None and wanted.name is None:
        # Backwards in blocks, each about twice as long as the one after it.
        found: list[Candidate] = []
        end: int | None = None
        index, width = len(places), 1
        while index > 0 and len(found) < count:
            index = max(0, index - width)
            found = [*_matching(streams, wanted, seen, places[index], end), *found][-count:]
            end, width = places[index], width * 2
        return found, seen
    matching = _matching(streams, wanted, seen, places[0], None)
    if wanted.order in ("best", "worst"):
        sign = 1 if wanted.order == "best" else -1

        def rank(each: Candidate) -> tuple[float, int, int]:
            return sign * each.reward, each.offset, each.place

        return (sorted(matching, key=rank, reverse=True) if count is None else nlargest(count, matching, rank)), seen
    if wanted.order == "first":
        return list(islice(matching, count)), seen
    return list(matching if count is None else deque(matching, count)), seen


def _matching(streams: StreamHub, wanted: Wanted, seen: Seen, start: int, end: int | None) -> Iterator[Candidate]:
    """The rollouts that pass the filters, in stream order."""
    if (evaluations := wanted.evaluations) is not None:
        for entry in read_entries(streams, EVALUATION_ROLLOUTS_TOPIC, ACTOR, EvaluationRollout, start, end):
            group = _as_group(entry.record)
            seen.add(group)
            if wanted.accepts(entry.record, evaluations):
                yield from wanted.rollouts(entry.offset, group)
        return
    for entry in read_entries(streams, ACTOR_TOPIC, ACTOR, GroupHead, start, end):
        seen.add(entry.record)
        found = list(wanted.rollouts(entry.offset, entry.record))
        yield from found
        if found and wanted.name is not None:
            return  # an id is in one group only


def _as_group(rollout: EvaluationRollout) -> GroupHead:
    """One rollout in the form of a group. Its version is the one that it was due at, even if it failed."""
    due = [VersionSpan(rollout.due_version, 0, 0)]
    reward = rollout.summary.reward if rollout.summary else 0.0
    names = [sample.id for sample in rollout.samples] or [rollout.id]
    return GroupHead(
        id=rollout.group_id,
        dataset_name=rollout.dataset_name,
        samples=[SampleHead(id=name, rollout_id=rollout.id, reward=reward, version_spans=due) for name in names],
        rollouts=[RolloutHead(rollout_id=rollout.id, reward=reward)],
    )


def load(streams: StreamHub, chosen: Iterable[Candidate]) -> Iterator[StoredRollout]:
    """The chosen rollouts of training with their tokens, in the order of `chosen`. Raises StreamError as `choose`."""
    offset, group = -1, None
    for candidate in chosen:
        if group is None or candidate.offset != offset:
            offset = candidate.offset
            group = _existing(streams, ACTOR_TOPIC, StoredGroup, offset)
        yield rollout_of(group, candidate.rollout_id)


def load_evaluations(streams: StreamHub, chosen: Iterable[Candidate]) -> Iterator[EvaluationRollout]:
    """As `load`, for rollouts of evaluations."""
    for candidate in chosen:
        yield _existing(streams, EVALUATION_ROLLOUTS_TOPIC, EvaluationRollout, candidate.offset)


def _existing(streams: StreamHub, topic: str, kind: Any, offset: int) -> Any:
    record = read_one(streams, topic, ACTOR, kind, offset)
    if record is None:
        raise StreamError(f"stream {topic}: the record at offset {offset} is gone")
    return record


def samples_of_step(streams: StreamHub, step: int) -> frozenset[str]:
    """Ids of the samples in the batch of optimizer step `step` (from 1).

    Raises:
        ConfigError: there is no such batch (yet).
    """
    last = 0
    places = streams.places(TRAINING_DATA_TOPIC, PREPROCESSOR)
    # The last place may be the end, where no batch is yet: the one before it knows which was the last.
    for place in (*places[-1:], *places[-2:-1]):
        # A batch a step from step 1 on, so the offset follows from the step.
        for entry in read_entries(streams, TRAINING_DATA_TOPIC, PREPROCESSOR, BatchHead, min(step - 1, place)):
            last = entry.record.step
            if last == step:
                return frozenset(entry.record.sample_ids)
        if last:
            break
    expected = f"one of the steps 1 to {last} that have a batch" if last else "a step, but no batch was made yet"
    raise ConfigError("--step", step, expected, "Leave it out, or name a step that the run has reached.")


def fates_of(streams: StreamHub, chosen: Iterable[Candidate]) -> dict[str, str]:
    """The fates of the samples of `chosen`, by id, as text; samples that are missing are pending.

    Only training that led to the newest weights counts as `trained`, as in the audit.
    """
    wanted = {name for candidate in chosen for name in candidate.sample_ids}
    lineage = Lineage()
    for message in read_all(streams, TRAINER_TOPIC, TRAINER, TrainerMessage):
        lineage.add(message)
    found: dict[str, str] = {}
    for source in (TRAINER, PREPROCESSOR, ACTOR):
        for record in read_all(streams, FATES_TOPIC, source, FateRecord):
            if text := fate_text(record, lineage):
                found.update((name, text) for name in record.sample_ids if name in wanted)
    return found


def fate_text(record: FateRecord, lineage: Lineage) -> str | None:
    """None: pending, or training that a restart rolled back."""
    if record.fate == "trained":
        return f"trained in step {record.version}" if lineage.survives(record.incarnation, record.version) else None
    return None if record.fate == "pending" else f"{record.fate}: {record.reason}"


def find_evaluations(streams: StreamHub, is_continued: bool = False) -> Evaluations:
    """The evaluations that have a result by now. Raises StreamError if the stream cannot be read.

    `is_continued`: each start continues the evaluation of the one before, so the result belongs to all of them.
    """
    found = Evaluations()
    for result in read_all(streams, EVALUATION_TOPIC, ACTOR, EvaluationResult):
        if result.success_rate is not None:  # without it all its rollouts failed
            starts = range(result.incarnation + 1) if is_continued else (result.incarnation,)
            found.made.setdefault((result.due_version, result.is_final), set()).update(starts)
    return found
