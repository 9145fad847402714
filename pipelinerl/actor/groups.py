"""Generates groups while training runs: starts them, collects their attempts, writes fates, publishes them.

After a restart, `find_started_groups` returns what has to run again and `find_unsettled_groups` what is in flight.

| who waits           | until                                                                     |
|---------------------|---------------------------------------------------------------------------|
| `GroupRunner.run`   | a slot is free and the sample budget allows a group, or training is done  |
| a group             | its last attempt has ended; each has a deadline                           |
| `publish_group`     | a full stream has room, or training is done                               |

While the stream of groups is full, running rollouts end, and new ones start only within the slots that groups waiting
to be written leave.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from msgspec.structs import replace

from pipelinerl.actor.problem_order import EpochCounter, ProblemOrder, rollout_seed
from pipelinerl.actor.progress import TrainingProgress
from pipelinerl.actor.scheduler import Scheduler
from pipelinerl.actor.stats import FailureLimit, RolloutAverages, Throughput
from pipelinerl.actor.worker_messages import (
    Answer,
    RolloutEnded,
    RolloutFailed,
    StartRollout,
)
from pipelinerl.domains.user_task import Problem
from pipelinerl.errors import NoRoom
from pipelinerl.records import BatchHead, Fate, FateRecord, Group, GroupHead, MetricRecord, Sample, record_time
from pipelinerl.rundir.heartbeat import Heartbeat
from pipelinerl.streams.base import ACTOR_TOPIC, FATES_TOPIC, PREPROCESSOR, TRAINING_DATA_TOPIC
from pipelinerl.streams.hub import LoopWriter, StreamHub
from pipelinerl.streams.read import read_all

#: Reasons of groups that the end of the run cut off: their problems are due again.
INTERRUPTED, TRAINING_DONE, RUN_ENDED = "interrupted", "training_done", "run_ended"
_CUT_OFF_REASONS = frozenset({INTERRUPTED, TRAINING_DONE, RUN_ENDED})


def number_of(group_id: str) -> int:
    """Position of a group in the order of problems; ids are `<incarnation>-<number>`."""
    return int(group_id.rpartition("-")[2])


@dataclass(frozen=True)
class Publisher:
    """Writes groups, and the fates of rollouts that are in none, which come before their group."""

    source: str
    incarnation: int
    groups: LoopWriter[Group]
    fates: LoopWriter[FateRecord]
    metrics: LoopWriter[MetricRecord]

    async def write_fate(
        self,
        fate: Fate,
        group_id: str,
        reason: str,
        num_rollouts: int,
        version: int,
        samples: Sequence[Sample] = (),
    ) -> None:
        """Write the fate of `num_rollouts` rollouts of a group and of their samples (`pending`: they are running)."""
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

    async def write_failures(self, group_id: str, failures: Sequence[RolloutFailed], version: int) -> None:
        """Write the fates of rollouts that failed, one record for each reason."""
        for reason, count in Counter(failure.reason for failure in failures).items():
            await self.write_fate("failed", group_id, reason, count, version)

    async def publish_group(self, record: Group, version: int) -> bool:
        """Write a group with samples, after `write_failures`. False: nobody reads it any more; it is given up."""
        try:
            await self.groups.write(record)
        except NoRoom:
            await self.write_fate("unused", record.id, TRAINING_DONE, len(record.rollouts), version, record.samples)
            return False
        return True

    async def publish_metrics(self, values: dict[str, float], version: int) -> None:
        await self.metrics.write(MetricRecord(source=self.source, step=version, time=record_time(), values=values))

    async def close(self) -> None:
        """Flush and release the streams."""
        async with AsyncExitStack() as stack:
            for writer in (self.metrics, self.fates, self.groups):
                stack.push_async_callback(writer.close)


@dataclass
class GroupRunner:
    """The training groups of one run.

    Attributes:
        numbers: positions in the order of problems to run; a restart sets them to what is left.
    """

    problems: ProblemOrder
    epochs: EpochCounter
    attempts: int
    seed: int
    incarnation: int
    scheduler: Scheduler
    progress: TrainingProgress
    publisher: Publisher
    failures: FailureLimit
    throughput: Throughput
    averages: RolloutAverages
    heartbeat: Heartbeat
    numbers: Iterator[int] = field(default_factory=itertools.count)
    _running: set[asyncio.Task[None]] = field(default_factory=set)
    _unfinished_attempts: int = 0
    _unwritten_groups: int = 0

    @property
    def running_groups(self) -> int:
        """Groups whose rollouts have not all ended."""
        return len(self._running)

    async def run(self) -> None:
        """Start and publish groups until training is done, then give up what is unfinished.

        Raises:
            WorkerError: too many rollouts fail.
        """
        progress = self.progress
        async with asyncio.TaskGroup() as tasks:
            while not progress.done:
                await progress.changes.wait_for(
                    lambda: progress.done or self._has_room(), progress.budget.policy.retry_s
                )
                if not progress.done:
                    self._start_group(tasks)
            for task in self._running:
                task.cancel()
            # Groups waiting to be written are not cancelled: they are written now or given up.
            self.publisher.groups.end_waits()

    def _has_room(self) -> bool:
        # Attempts get their slots a moment after their group started, so they are counted too.
        slots = self.scheduler.total_slots
        has_slot = self._unfinished_attempts < slots and self.scheduler.has_free_slot
        # Groups waiting for a full stream occupy memory: at most about as many as could run.
        is_written = not self._unwritten_groups or self._unwritten_groups * self.attempts < slots
        return has_slot and is_written and self.progress.needs_groups and self.progress.budget.allows_group()

    def _start_group(self, tasks: asyncio.TaskGroup) -> None:
        number = next(self.numbers)
        group_id = f"{self.incarnation}-{number}"
        self.progress.budget.start_group(group_id)
        self._unfinished_attempts += self.attempts
        task = tasks.create_task(self._run_group(group_id, self.problems[number]), name=group_id)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _run_group(self, group_id: str, problem: Problem) -> None:
        ended: list[Answer] = []
        try:
            await self.publisher.write_fate(
                "pending", group_id, "started", self.attempts, self.progress.current_version
            )
            async with asyncio.TaskGroup() as attempts:
                tasks = [
                    attempts.create_task(self._run_attempt(group_id, problem, index, ended))
                    for index in range(self.attempts)
                ]
        except asyncio.CancelledError:
            reason = TRAINING_DONE if self.progress.done else RUN_ENDED
            version = self.progress.current_version
            failures = [answer for answer in ended if isinstance(answer, RolloutFailed)]
            samples = [sample for answer in ended if isinstance(answer, RolloutEnded) for sample in answer.samples]
            await self.publisher.write_failures(group_id, failures, version)
            if (cut := self.attempts - len(failures)) > 0:
                await self.publisher.write_fate("unused", group_id, reason, cut, version, samples)
            raise
        task = asyncio.current_task()
        assert task is not None
        self._running.discard(task)
        await self._publish(*make_group(group_id, problem, [task.result() for task in tasks], self.incarnation))
        self._unwritten_groups -= 1
        self.progress.changes.notify()

    async def _run_attempt(self, group_id: str, problem: Problem, index: int, ended: list[Answer]) -> Answer:
        answer = await self.scheduler.run(
            StartRollout(
                rollout_id=f"{group_id}/r{index}",
                group_id=group_id,
                problem=problem.data,
                # By position, not by incarnation: a repeated group starts with the same seeds.
                seed=rollout_seed(self.seed, "train", number_of(group_id), index),
            )
        )
        # The group counts as unwritten from its last answer on, not from when its own task continues: no other group
        # may start in between.
        self._unfinished_attempts -= 1
        ended.append(answer)
        self._unwritten_groups += len(ended) == self.attempts
        self.heartbeat.progress()
        match answer:
            case RolloutEnded():
                self.progress.budget.end_rollout(group_id, len(answer.samples))
                self.failures.record_success()
                self.throughput.add(answer.summary.output_tokens, answer.requests)
                self.averages.add(answer.summary, answer.dataset_name or problem.dataset_name)
            case RolloutFailed():
                self.progress.budget.end_rollout(group_id, 0)
                self.failures.record_failure(answer.reason, answer.message)
                self.throughput.add(0, answer.requests)
        self.progress.changes.notify()
        return answer

    async def _publish(self, record: Group, failures: list[RolloutFailed]) -> None:
        """Fates first, then the budget, then the group."""
        version = self.progress.current_version
        await self.publisher.write_failures(record.id, failures, version)
        if record.rollouts and not record.samples:
            await self.publisher.write_fate("failed", record.id, "no_samples", len(record.rollouts), version)
        # Nothing is awaited between here and `publish_group`, which writes in call order, so `epochs_done` never
        # decreases along the stream.
        self.epochs.end(number_of(record.id))
        record = replace(record, epochs_done=self.epochs.epochs_done)
        # Before the group is readable: its samples may be settled before `write` returns.
        self.progress.budget.publish(record.id, [sample.id for sample in record.samples])
        if not record.samples or await self.publisher.publish_group(record, version):
            self.progress.published(record.id, len(record.samples), record.epochs_done)


def make_group(
    group_id: str, problem: Problem, answers: Sequence[Answer], incarnation: int
) -> tuple[Group, list[RolloutFailed]]:
    """Return the group of all attempts in order (without samples if all failed), and the failures."""
    ended = [answer for answer in answers if isinstance(answer, RolloutEnded)]
    failures = [answer for answer in answers if isinstance(answer, RolloutFailed)]
    names = [answer.dataset_name for answer in ended if answer.dataset_name]
    record = Group(
        id=group_id,
        problem_id=problem.id,
        dataset_name=names[0] if names else problem.dataset_name,
        samples=[sample for answer in ended for sample in answer.samples],
        rollouts=[answer.summary for answer in ended],
        failed_rollouts=len(failures),
        incarnation=incarnation,
    )
    return record, failures


@dataclass
class StartedGroups:
    """Every group that was started before the restart.

    Attributes:
        open_groups: number of rollouts without a fate, by group that was neither published nor given up.
        numbers_due: positions in the order of problems that have to run again.
        next_number: follows the last position that was started.
    """

    open_groups: dict[str, int] = field(default_factory=dict)
    numbers_due: list[int] = field(default_factory=list)
    next_number: int = 0


def find_started_groups(streams: StreamHub, actor: str) -> StartedGroups:
    """Return what the actor's own streams say about the groups that were started."""
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
    """Return the published samples, by group, that are unsettled after `steps_done` steps.

    Batches up to that step are trained. Later batches will be trained again, so their groups are in flight, as are
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
