"""Chooses rollouts by place, reward, data set, version, step or id, and keeps no more of them than are asked for.

Fed by `samples.scan` with the heads of groups in the order of the stream. Pure.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from pipelinerl.records import GroupHead, SampleHead

Order = Literal["last", "first", "best", "worst"]
# A run has a few data sets; more names are not kept.
_MAX_DATASETS = 100


@dataclass(frozen=True, slots=True)
class Candidate:
    """One rollout: the group at `offset` of the stream, its place in that group, and what it is chosen by."""

    offset: int
    place: int
    rollout_id: str
    reward: float
    sample_ids: tuple[str, ...]


@dataclass(frozen=True)
class Wanted:
    """Which rollouts: the filters, all of which must hold, then `count` of what is left (None: all) in `order`.

    `name` is the id of a group, a rollout or a sample; `sample_ids` are those of one optimizer step.
    """

    order: Order = "last"
    count: int | None = 3
    dataset: str | None = None
    version: int | None = None
    name: str | None = None
    sample_ids: frozenset[str] | None = None

    def rollouts(self, offset: int, group: GroupHead) -> Iterator[Candidate]:
        """The rollouts of `group` that pass the filters, in its order."""
        if self.dataset is not None and group.dataset_name != self.dataset:
            return
        for candidate, samples in _rollouts_of(offset, group):
            if self.version is not None and not any(
                span.version == self.version for sample in samples for span in sample.version_spans
            ):
                continue
            if self.name is not None and self.name not in (group.id, candidate.rollout_id, *candidate.sample_ids):
                continue
            if self.sample_ids is not None and self.sample_ids.isdisjoint(candidate.sample_ids):
                continue
            yield candidate


def _rollouts_of(offset: int, group: GroupHead) -> Iterator[tuple[Candidate, list[SampleHead]]]:
    by_rollout: dict[str, list[SampleHead]] = defaultdict(list)
    rewards = {rollout.rollout_id: rollout.reward for rollout in group.rollouts}
    for sample in group.samples:
        by_rollout[sample.rollout_id].append(sample)
    for place, rollout_id in enumerate(dict.fromkeys((*rewards, *by_rollout))):
        samples = by_rollout.get(rollout_id, [])
        reward = rewards.get(rollout_id)
        if reward is None:
            reward = sum(sample.reward for sample in samples) / len(samples)
        yield Candidate(offset, place, rollout_id, reward, tuple(sample.id for sample in samples)), samples


@dataclass
class Seen:
    """What was looked at, for the message when nothing was found. `versions` are the lowest and the highest."""

    groups: int = 0
    datasets: set[str] = field(default_factory=set)
    versions: tuple[int, int] | None = None

    def add(self, group: GroupHead) -> None:
        self.groups += 1
        if len(self.datasets) < _MAX_DATASETS:
            self.datasets.add(group.dataset_name)
        for sample in group.samples:
            for span in sample.version_spans:
                low, high = self.versions or (span.version, span.version)
                self.versions = min(low, span.version), max(high, span.version)


class Chooser:
    """Takes groups in the order of the stream and holds the best `wanted.count` rollouts so far.

    `ids_repeat`: records with the same id of a group may follow one another.
    """

    def __init__(self, wanted: Wanted, seen: Seen, ids_repeat: bool = False) -> None:
        self._wanted, self._seen = wanted, seen
        self._ids_repeat = ids_repeat
        self._heap: list[tuple[tuple[float, ...], Candidate]] = []
        self._found_name = False

    def add(self, offset: int, group: GroupHead) -> None:
        self._seen.add(group)
        wanted = self._wanted
        for candidate in wanted.rollouts(offset, group):
            self._found_name = wanted.name is not None and not self._ids_repeat
            entry = (_rank(candidate, wanted.order), candidate)
            if wanted.count is None or len(self._heap) < wanted.count:
                heapq.heappush(self._heap, entry)
            else:
                heapq.heappushpop(self._heap, entry)

    @property
    def is_done(self) -> bool:
        """Whether no later group can change the choice: ids are in one group only."""
        is_full = self._wanted.count is not None and len(self._heap) >= self._wanted.count
        return self._found_name or (self._wanted.order == "first" and is_full)

    def chosen(self) -> list[Candidate]:
        """By reward, the first one is the best or the worst; else in the order of the stream."""
        by_reward = self._wanted.order in ("best", "worst")
        ranked = [candidate for _, candidate in sorted(self._heap, key=lambda entry: entry[0], reverse=True)]
        return ranked if by_reward else sorted(ranked, key=lambda each: (each.offset, each.place))


def _rank(candidate: Candidate, order: Order) -> tuple[float, ...]:
    """The larger, the rather it is kept; no two are equal. Of equal rewards the newer rollout is kept."""
    where = (candidate.offset, candidate.place)
    if order == "first":
        return -candidate.offset, -candidate.place
    if order == "last":
        return where
    return (candidate.reward if order == "best" else -candidate.reward), *where
