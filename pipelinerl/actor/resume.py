"""What a restarted actor finds in the streams: samples in flight from before, and evaluations that were made.

Called once, when the servers have their weights again. Only the few fields that are needed are decoded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from pipelinerl.actor.trainer_state import PREPROCESSOR_INSTANCE
from pipelinerl.records import SCHEMA_VERSION, Fate
from pipelinerl.streams.base import ACTOR_TOPIC, EVALUATION_TOPIC, FATES_TOPIC, TRAINING_DATA_TOPIC
from pipelinerl.streams.hub import StreamHub


class _SampleHead(msgspec.Struct):
    id: str


class _GroupHead(msgspec.Struct, kw_only=True):
    id: str
    samples: list[_SampleHead]
    schema: int = SCHEMA_VERSION


class _BatchHead(msgspec.Struct, kw_only=True):
    step: int
    group_ids: list[str]
    actor_offset: int
    schema: int = SCHEMA_VERSION


class _FateHead(msgspec.Struct, kw_only=True):
    sample_ids: list[str]
    fate: Fate
    schema: int = SCHEMA_VERSION


class _EvaluationHead(msgspec.Struct, kw_only=True):
    due_version: int
    schema: int = SCHEMA_VERSION


def find_unsettled_groups(streams: StreamHub, actor: str, version: int) -> dict[str, list[str]]:
    """Return the published samples, by group, that are not settled for a trainer at `version`.

    A batch up to step `version` is trained. Later batches that were dispatched before are trained again, so their
    groups are in flight, as are groups in no batch whose samples nobody dropped.
    """
    trained: set[str] = set()
    offset = 0
    for batch in _all(streams, TRAINING_DATA_TOPIC, PREPROCESSOR_INSTANCE, _BatchHead):
        if batch.step <= version:
            trained.update(batch.group_ids)
            offset = max(offset, batch.actor_offset)
    dropped: set[str] = set()
    for fate in _all(streams, FATES_TOPIC, PREPROCESSOR_INSTANCE, _FateHead):
        if fate.fate != "pending":
            dropped.update(fate.sample_ids)
    unsettled = {}
    for group in _all(streams, ACTOR_TOPIC, actor, _GroupHead, offset):
        ids = [sample.id for sample in group.samples if sample.id not in dropped]
        if ids and group.id not in trained:
            unsettled[group.id] = ids
    return unsettled


def has_evaluation(streams: StreamHub, actor: str, due_version: int) -> bool:
    """Return whether the evaluation due at `due_version` was made."""
    return any(
        evaluation.due_version == due_version for evaluation in _all(streams, EVALUATION_TOPIC, actor, _EvaluationHead)
    )


def _all(streams: StreamHub, topic: str, instance: str, record_type: Any, offset: int = 0) -> Iterator[Any]:
    reader = streams.reader(topic, instance, record_type, offset)
    try:
        while entries := reader.read(timeout_s=0):
            for entry in entries:
                yield entry.record
    finally:
        reader.close()
