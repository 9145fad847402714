"""What a replay reads from the streams of a run: groups, batches, and the numbers that the trainer reported.

Called by `replay.run`. Waits for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipelinerl.records import Group, MetricRecord, TrainerMessage, TrainingBatch
from pipelinerl.streams.base import ACTOR_TOPIC, METRICS_TOPIC, TRAINER_TOPIC, TRAINING_DATA_TOPIC
from pipelinerl.streams.hub import StreamHub
from pipelinerl.tracking.lineage import Lineage

TRAINER, PREPROCESSOR, ACTOR = "finetune_0", "preprocessor_0", "actor_0"


def recorded_batches(streams: StreamHub) -> Iterator[TrainingBatch]:
    """Every batch, in the order of its step."""
    return _all(streams, TRAINING_DATA_TOPIC, PREPROCESSOR, TrainingBatch)


def recorded_groups(streams: StreamHub) -> Iterator[Group]:
    """Every group, in the order in which they were published."""
    return _all(streams, ACTOR_TOPIC, ACTOR, Group)


def recorded_numbers(streams: StreamHub) -> dict[int, dict[str, float]]:
    """The trainer's metrics by step; of a step that was taken again, the newest."""
    return {record.step: record.values for record in _all(streams, METRICS_TOPIC, TRAINER, MetricRecord)}


def last_step(streams: StreamHub) -> int:
    """The step behind the newest weights."""
    lineage = Lineage()
    for message in _all(streams, TRAINER_TOPIC, TRAINER, TrainerMessage):
        lineage.fold(message)
    return lineage.last_step


def _all(streams: StreamHub, topic: str, instance: str, record_type: Any) -> Iterator[Any]:
    reader = streams.reader(topic, instance, record_type)
    try:
        while entries := reader.read(timeout_s=0, max_records=16):
            for entry in entries:
                yield entry.record
    finally:
        reader.close()
