"""Reads a run's recorded rollouts: heads until the choice is made, then the chosen groups, one at a time.

Called by the command `samples`, on running runs too. Waits for nothing: what is not there yet is not waited for. Never
holds more than the choice and one group. The newest rollouts are found from the end of the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from pipelinerl.errors import ConfigError, StreamError
from pipelinerl.records import BatchHead, FateRecord, GroupHead, TrainerMessage
from pipelinerl.samples.choose import Candidate, Chooser, Seen, Wanted
from pipelinerl.samples.recorded import StoredGroup, StoredRollout, rollout_of
from pipelinerl.streams.base import (
    ACTOR,
    ACTOR_TOPIC,
    FATES_TOPIC,
    PREPROCESSOR,
    TRAINER,
    TRAINER_TOPIC,
    TRAINING_DATA_TOPIC,
)
from pipelinerl.streams.hub import StreamHub
from pipelinerl.streams.read import read_entries
from pipelinerl.tracking.lineage import Lineage


@dataclass(frozen=True)
class Source:
    """A stream of the actor that rollouts are chosen from.

    `as_group` makes a group of the head of a record; `wants` says whether it may be chosen; `ids_repeat`: several
    records may be of the same group.
    """

    topic: str
    head_type: Any
    as_group: Callable[[Any], GroupHead]
    wants: Callable[[Any], bool]
    ids_repeat: bool


TRAINING = Source(ACTOR_TOPIC, GroupHead, lambda group: group, lambda group: True, ids_repeat=False)


def choose(streams: StreamHub, wanted: Wanted, source: Source = TRAINING) -> tuple[list[Candidate], Seen]:
    """The rollouts that `wanted` asks for, and what was looked at to find them.

    Raises:
        StreamError: a record cannot be read, with file, offset and reason.
    """
    seen = Seen()
    places = streams.places(source.topic, ACTOR)
    if not places:
        return [], seen
    if wanted.order == "last" and wanted.count is not None and wanted.name is None:
        return _newest(streams, source, wanted, wanted.count, places, seen), seen
    return _fold(streams, source, wanted, seen, places[0], None), seen


def _newest(
    streams: StreamHub, source: Source, wanted: Wanted, count: int, places: list[int], seen: Seen
) -> list[Candidate]:
    """Go backwards in blocks, each about twice as long as the one behind it."""
    found: list[Candidate] = []
    end: int | None = None
    index, width = len(places), 1
    while index > 0 and len(found) < count:
        index = max(0, index - width)
        missing = replace(wanted, count=count - len(found))
        found = _fold(streams, source, missing, seen, places[index], end) + found
        end, width = places[index], width * 2
    return found


def _fold(
    streams: StreamHub, source: Source, wanted: Wanted, seen: Seen, start: int, end: int | None
) -> list[Candidate]:
    chooser = Chooser(wanted, seen, source.ids_repeat)
    for entry in read_entries(streams, source.topic, ACTOR, source.head_type, start, end):
        group = source.as_group(entry.record)
        if not source.wants(entry.record):
            seen.add(group)
            continue
        chooser.add(entry.offset, group)
        if chooser.is_done:
            break
    return chooser.chosen()


def load(streams: StreamHub, chosen: Iterable[Candidate]) -> Iterator[StoredRollout]:
    """The chosen rollouts with their tokens, in the order of `chosen`. Raises StreamError as `choose` does."""
    offset, group = -1, None
    for candidate in chosen:
        if group is None or candidate.offset != offset:
            offset = candidate.offset
            entries = read_entries(streams, ACTOR_TOPIC, ACTOR, StoredGroup, offset, offset + 1)
            entry = next(entries, None)
            if entry is None:
                raise StreamError(f"stream {ACTOR_TOPIC}: the record at offset {offset} is gone")
            group = entry.record
        yield rollout_of(group, candidate.rollout_id)


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
    """What became of the samples of `chosen`, by id, as text; one that is not in it is pending.

    `trained` counts along the line of steps that leads to the newest weights, as in the audit.
    """
    wanted = {name for candidate in chosen for name in candidate.sample_ids}
    lineage = Lineage()
    for entry in read_entries(streams, TRAINER_TOPIC, TRAINER, TrainerMessage):
        lineage.fold(entry.record)
    found: dict[str, str] = {}
    for source in (TRAINER, PREPROCESSOR, ACTOR):
        for entry in read_entries(streams, FATES_TOPIC, source, FateRecord):
            record: FateRecord = entry.record
            if text := _fate_text(record, lineage):
                found.update((name, text) for name in record.sample_ids if name in wanted)
    return found


def _fate_text(record: FateRecord, lineage: Lineage) -> str | None:
    """None for what is no fate (yet), and for training that a restart rolled back."""
    if record.fate == "trained":
        return f"trained in step {record.version}" if lineage.survives(record.incarnation, record.version) else None
    return None if record.fate == "pending" else f"{record.fate}: {record.reason}"
