"""What a replay reads from the streams of a run: groups, batches, and the numbers that the trainer reported.

Called by `replay.run`. Waits for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipelinerl.records import Group, MetricRecord, TrainerMessage, TrainingBatch
from pipelinerl.streams.base import (
    ACTOR,
    ACTOR_TOPIC,
    METRICS_TOPIC,
    PREPROCESSOR,
    TRAINER,
    TRAINER_TOPIC,
    TRAINING_DATA_TOPIC,
)
from pipelinerl.streams.hub import StreamHub
from pipelinerl.streams.read import read_all
from pipelinerl.tracking.lineage import Lineage


def recorded_batches(streams: StreamHub) -> Iterator[TrainingBatch]:
    """Every batch, in the order of its step."""
    return read_all(streams, TRAINING_DATA_TOPIC, PREPROCESSOR, TrainingBatch)


def recorded_groups(streams: StreamHub) -> Iterator[Group]:
    """Every group, in the order in which they were published."""
    return read_all(streams, ACTOR_TOPIC, ACTOR, Group)


def recorded_numbers(streams: StreamHub) -> dict[int, dict[str, float]]:
    """The trainer's metrics by step; of a step that was taken again, the newest."""
    return {record.step: record.values for record in read_all(streams, METRICS_TOPIC, TRAINER, MetricRecord)}


def last_step(streams: StreamHub) -> int:
    """The step behind the newest weights."""
    lineage = Lineage()
    for message in read_all(streams, TRAINER_TOPIC, TRAINER, TrainerMessage):
        lineage.fold(message)
    return lineage.last_step
