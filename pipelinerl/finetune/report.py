"""Tells the rest of the run what the trainer did: messages, fates, metrics. Called by the loop on rank 0.

`TrainerStarted` comes first. Order of one step: weight update, fates of the trained samples, `StepDone`, metrics.
`TrainingDone` comes last.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from pipelinerl.finetune.state import TrainerState
from pipelinerl.finetune.weights_feed import Delivery
from pipelinerl.records import (
    FateRecord,
    Sample,
    StepDone,
    TrainerMessage,
    TrainerStarted,
    TrainingBatch,
    TrainingDone,
    WeightUpdateSuccess,
)
from pipelinerl.streams.base import StreamWriter

SOURCE = "finetune_0"


class Recorder(Protocol):
    """The part of `MetricRecorder` that the trainer uses."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...


@dataclass(frozen=True)
class Reporter:
    """Writes what rank 0 has to say. Every write raises StreamError if the stream cannot take it."""

    messages: StreamWriter[TrainerMessage]
    fates: StreamWriter[FateRecord]
    metrics: Recorder
    incarnation: int = 0
    clock: Callable[[], float] = time.time

    def started(self, state: TrainerState) -> None:
        """Say where this incarnation goes on: the steps that an older one did behind that do not count."""
        self.messages.write(
            TrainerStarted(
                step=state.step, data_offset=state.data_offset, time=self.clock(), incarnation=self.incarnation
            )
        )
        self.messages.flush()

    def weights_delivered(self, delivery: Delivery) -> None:
        self.messages.write(
            WeightUpdateSuccess(
                version=delivery.version,
                time=self.clock(),
                seconds=delivery.seconds,
                num_servers=delivery.num_servers,
                probe_abs_diff=delivery.probe_abs_diff,
                sent_bytes=delivery.sent_bytes,
                incarnation=self.incarnation,
            )
        )
        self.messages.flush()

    def step_done(self, batch: TrainingBatch, state: TrainerState) -> None:
        """Settle the samples of `batch` as trained, one fate record for each group, then say that the step is done."""
        for group_id, samples in _by_group(batch).items():
            self.fates.write(
                FateRecord(
                    sample_ids=[sample.id for sample in samples],
                    fate="trained",
                    reason="trained",
                    version=batch.step,
                    group_id=group_id,
                    source=SOURCE,
                    output_tokens=sum(sample.output_tokens for sample in samples),
                    incarnation=self.incarnation,
                )
            )
        self.fates.flush()
        self.messages.write(
            StepDone(
                step=batch.step,
                time=self.clock(),
                group_ids=batch.group_ids,
                num_samples=len(batch.samples),
                samples_processed=state.samples_processed,
                incarnation=self.incarnation,
            )
        )
        self.messages.flush()

    def training_done(self, state: TrainerState) -> None:
        self.messages.write(
            TrainingDone(
                version=state.step,
                time=self.clock(),
                samples_processed=state.samples_processed,
                incarnation=self.incarnation,
            )
        )
        self.messages.flush()


def _by_group(batch: TrainingBatch) -> dict[str, list[Sample]]:
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in batch.samples:
        groups[sample.group_id].append(sample)
    return groups
