"""Writes what the actor decides: groups, fates of failed rollouts, evaluation results, metrics.

Called by the actor's loops. A fate is written before the group that it belongs to. Waits for the streams only.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pipelinerl.actor.groups import FinishedGroup
from pipelinerl.records import EvaluationResult, Fate, FateRecord, Group, MetricRecord, Sample
from pipelinerl.streams.base import StreamWriter


@dataclass(frozen=True)
class Publisher:
    """The actor's four writers; `source` is its job name."""

    source: str
    incarnation: int
    groups: StreamWriter[Group]
    fates: StreamWriter[FateRecord]
    evaluations: StreamWriter[EvaluationResult]
    metrics: StreamWriter[MetricRecord]

    def start_group(self, group_id: str, num_rollouts: int, version: int) -> None:
        """Write that a group is under way, so that a restart knows of it."""
        self._write("pending", group_id, [], "started", num_rollouts, version)

    def publish_group(self, finished: FinishedGroup, version: int) -> None:
        """Write the fates of failed rollouts (one record per reason), then the group if it has a sample."""
        group_id = finished.record.id
        for reason, count in Counter(failure.reason for failure in finished.failures).items():
            self._write("failed", group_id, [], reason, count, version)
        if finished.record.samples:
            self.groups.write(finished.record)
        elif finished.record.rollouts:
            self._write("failed", group_id, [], "no_samples", len(finished.record.rollouts), version)

    def give_up_group(
        self, group_id: str, samples: Sequence[Sample], num_rollouts: int, reason: str, version: int
    ) -> None:
        """Write the fate of a group that is never published: its finished samples, and all its rollouts."""
        self._write("failed", group_id, samples, reason, num_rollouts, version)

    def publish_evaluation(self, results: list[EvaluationResult]) -> None:
        for result in results:
            self.evaluations.write(result)
        self.evaluations.flush()

    def publish_metrics(self, values: dict[str, float], version: int) -> None:
        """Write one metric record, if there is anything to say."""
        if values:
            self.metrics.write(MetricRecord(source=self.source, step=version, time=time.time(), values=values))

    def close(self) -> None:
        for writer in (self.groups, self.fates, self.evaluations, self.metrics):
            writer.flush()
            writer.close()

    def _write(
        self, fate: Fate, group_id: str, samples: Sequence[Sample], reason: str, num_rollouts: int, version: int
    ) -> None:
        self.fates.write(
            FateRecord(
                sample_ids=[sample.id for sample in samples],
                fate=fate,
                reason=reason,
                version=version,
                group_id=group_id,
                source=self.source,
                output_tokens=sum(sample.output_tokens for sample in samples),
                num_rollouts=num_rollouts,
                incarnation=self.incarnation,
            )
        )
