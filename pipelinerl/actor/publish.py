"""Writes what the actor decides: groups, fates of failed rollouts, evaluation results, metrics.

Called by the actor's loops, which go on meanwhile. A fate is written before the group that it belongs to. Waits for the
streams only; a group may have to wait until the preprocessor has read others.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from pipelinerl.actor.groups import FinishedGroup
from pipelinerl.errors import NoRoom
from pipelinerl.records import EvaluationResult, Fate, FateRecord, Group, MetricRecord, Sample
from pipelinerl.streams.hub import LoopWriter

#: Why a group was given up that was finished or running when training ended.
TRAINING_DONE = "training_done"


@dataclass(frozen=True)
class Publisher:
    """The actor's four writers; `source` is its job name."""

    source: str
    incarnation: int
    groups: LoopWriter[Group]
    fates: LoopWriter[FateRecord]
    evaluations: LoopWriter[EvaluationResult]
    metrics: LoopWriter[MetricRecord]

    async def start_group(self, group_id: str, num_rollouts: int, version: int) -> None:
        """Write that a group is under way, so that a restart knows of it."""
        await self._write("pending", group_id, [], "started", num_rollouts, version)

    async def write_failures(self, finished: FinishedGroup, version: int) -> None:
        """Write the fates of the rollouts that brought nothing (one record per reason)."""
        group_id = finished.record.id
        for reason, count in Counter(failure.reason for failure in finished.failures).items():
            await self._write("failed", group_id, [], reason, count, version)
        if finished.record.rollouts and not finished.record.samples:
            await self._write("failed", group_id, [], "no_samples", len(finished.record.rollouts), version)

    async def publish_group(self, record: Group, version: int) -> bool:
        """Write a group with samples, behind `write_failures`. False: it was given up, for nobody reads it any more."""
        try:
            await self.groups.write(record)
        except NoRoom:
            await self.give_up_group(record.id, record.samples, len(record.rollouts), TRAINING_DONE, version)
            return False
        return True

    def stop_waiting(self) -> None:
        """Training is done: a group for which the stream has no room is given up."""
        self.groups.end_waits()

    async def give_up_group(
        self, group_id: str, samples: Sequence[Sample], num_rollouts: int, reason: str, version: int
    ) -> None:
        """Write the fate of a group that is never published: its finished samples, and all its rollouts."""
        await self._write("failed", group_id, samples, reason, num_rollouts, version)

    async def publish_evaluation(self, results: list[EvaluationResult]) -> None:
        for result in results:
            await self.evaluations.write(result)
        await self.evaluations.flush()

    async def publish_metrics(self, values: dict[str, float], version: int) -> None:
        """Write one metric record, if there is anything to say."""
        if values:
            await self.metrics.write(MetricRecord(source=self.source, step=version, time=time.time(), values=values))

    async def close(self) -> None:
        """Bring to the streams what was handed over, and release them."""
        async with AsyncExitStack() as stack:
            for writer in (self.metrics, self.evaluations, self.fates, self.groups):
                stack.push_async_callback(writer.close)

    async def _write(
        self, fate: Fate, group_id: str, samples: Sequence[Sample], reason: str, num_rollouts: int, version: int
    ) -> None:
        await self.fates.write(
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
