"""What a restarted actor finds in the streams: samples in flight, groups to run again, evaluations that were made."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from pipelinerl.actor.groups import INTERRUPTED, RUN_ENDED, TRAINING_DONE, number_of
from pipelinerl.records import BatchHead, EvaluationResult, FateRecord, GroupHead
from pipelinerl.streams.base import ACTOR_TOPIC, EVALUATION_TOPIC, FATES_TOPIC, PREPROCESSOR, TRAINING_DATA_TOPIC
from pipelinerl.streams.hub import StreamHub
from pipelinerl.streams.read import read_all

_CUT_OFF_REASONS = frozenset({INTERRUPTED, TRAINING_DONE, RUN_ENDED})


@dataclass
class StartedGroups:
    """Every group that was started before the restart.

    Attributes:
        open_groups: rollouts without a fate, by group that was neither published nor given up.
        numbers_due: places in the order of problems that have to run again.
        next_number: follows the last place that was started.
    """

    open_groups: dict[str, int] = field(default_factory=dict)
    numbers_due: list[int] = field(default_factory=list)
    next_number: int = 0


def find_started_groups(streams: StreamHub, actor: str) -> StartedGroups:
    """Return what became of the groups that were started, according to the actor's own streams."""
    started: dict[str, int] = {}
    failed: Counter[str] = Counter()
    cut_off: set[str] = set()
    for fate in read_all(streams, FATES_TOPIC, actor, FateRecord):
        if fate.fate == "pending":
            started[fate.group_id] = fate.num_rollouts
        else:
            failed[fate.group_id] += fate.num_rollouts
            if fate.reason in _CUT_OFF_REASONS:
                cut_off.add(fate.group_id)
    published = {group.id for group in read_all(streams, ACTOR_TOPIC, actor, GroupHead)}
    result = StartedGroups()
    finished: set[int] = {number_of(group_id) for group_id in published}
    for group_id, rollouts in started.items():
        if group_id in published:
            continue
        if (left := rollouts - failed[group_id]) > 0:
            result.open_groups[group_id] = left
        elif group_id not in cut_off:
            finished.add(number_of(group_id))
    result.next_number = max(map(number_of, [*started, *published]), default=-1) + 1
    result.numbers_due = [number for number in range(result.next_number) if number not in finished]
    return result


def find_unsettled_groups(streams: StreamHub, actor: str, steps_done: int) -> dict[str, list[str]]:
    """Return the published samples, by group, that a trainer which has finished `steps_done` steps has not settled.

    Batches up to that step are trained. Later batches will be trained again, so their groups are in flight; so are
    groups in no batch whose samples were not dropped.
    """
    trained: set[str] = set()
    offset = 0
    for batch in read_all(streams, TRAINING_DATA_TOPIC, PREPROCESSOR, BatchHead):
        if batch.step <= steps_done:
            trained.update(batch.group_ids)
            offset = max(offset, batch.actor_offset)
    dropped: set[str] = set()
    for fate in read_all(streams, FATES_TOPIC, PREPROCESSOR, FateRecord):
        if fate.fate != "pending":
            dropped.update(fate.sample_ids)
    unsettled = {}
    for group in read_all(streams, ACTOR_TOPIC, actor, GroupHead, offset):
        ids = [sample.id for sample in group.samples if sample.id not in dropped]
        if ids and group.id not in trained:
            unsettled[group.id] = ids
    return unsettled


def find_evaluations(streams: StreamHub, actor: str) -> set[tuple[int, bool]]:
    """Return (due version, is final) of every evaluation that was made; if all its rollouts failed it was not."""
    return {
        (evaluation.due_version, evaluation.is_final)
        for evaluation in read_all(streams, EVALUATION_TOPIC, actor, EvaluationResult)
        if evaluation.success_rate is not None
    }
