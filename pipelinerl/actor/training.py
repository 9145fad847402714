"""Starts groups for as long as training goes on, and publishes each one when its last attempt has ended.

Called by the actor's loop. Waits for a free slot and for room in the sample budget, whichever is missing. While the
stream of groups is full, rollouts that run come to their end and no more are started than could run beside those that
wait to be written.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from msgspec.structs import replace

from pipelinerl.actor.admission import SampleBudget
from pipelinerl.actor.failures import FailureLimit
from pipelinerl.actor.frames import RolloutEnded, RolloutFailed
from pipelinerl.actor.groups import Answer, FinishedGroup, run_group
from pipelinerl.actor.passes import Passes
from pipelinerl.actor.problems import ProblemOrder
from pipelinerl.actor.publish import TRAINING_DONE, Publisher
from pipelinerl.actor.resume import number_of
from pipelinerl.actor.scheduler import Scheduler
from pipelinerl.actor.slots import ServerSlots
from pipelinerl.actor.trainer_state import TrainerState
from pipelinerl.domains.problem_sets import Problem
from pipelinerl.records import Sample

logger = logging.getLogger(__name__)


@dataclass
class TrainingRollouts:
    """Training rollouts of one run. `on_answer` hears of every attempt that ended, with its problem.

    `numbers` are the places in the order of problems to run; a restart sets them to what is left. `on_published` hears
    of every group that was written and of the number of its samples.
    """

    problems: ProblemOrder
    passes: Passes
    attempts: int
    seed: int
    incarnation: int
    scheduler: Scheduler
    slots: ServerSlots
    budget: SampleBudget
    failures: FailureLimit
    trainer: TrainerState
    publisher: Publisher
    on_answer: Callable[[Answer, Problem], None]
    numbers: Iterator[int] = field(default_factory=itertools.count)
    on_published: Callable[[str, int], None] | None = None
    _groups: set[asyncio.Task[None]] = field(default_factory=set)
    _unfinished_attempts: int = 0
    _unwritten_groups: int = 0

    async def run(self) -> None:
        """Start and publish groups until the trainer is done; give up what is unfinished then.

        Raises:
            WorkerError: too many rollouts fail.
        """
        async with asyncio.TaskGroup() as tasks:
            with self.trainer.subscribe() as changed:
                while not self.trainer.done:
                    changed.clear()
                    while not self.trainer.done and self._has_room():
                        number = next(self.numbers)
                        group_id = f"{self.incarnation}-{number}"
                        self.budget.admit(group_id)
                        self._unfinished_attempts += self.attempts
                        task = tasks.create_task(self._run_group(group_id, self.problems[number]), name=group_id)
                        self._groups.add(task)
                        task.add_done_callback(self._groups.discard)
                    await changed.wait()
            for task in self._groups:
                task.cancel()
            # Groups that wait to be written are not cut off: they are written now, or given up.
            self.publisher.stop_waiting()

    def _has_room(self) -> bool:
        # Attempts take their slots a moment after their group was started, so they are counted as well.
        free = self._unfinished_attempts < self.slots.total and self.slots.has_idle
        # Groups that wait for a full stream are memory: at most about as much as what runs.
        written = not self._unwritten_groups or self._unwritten_groups * self.attempts < self.slots.total
        return free and written and self.budget.can_admit()

    @property
    def running_groups(self) -> int:
        """Groups whose rollouts have not all ended."""
        return len(self._groups)

    async def _run_group(self, group_id: str, problem: Problem) -> None:
        finished: list[Sample] = []

        def on_answer(answer: Answer) -> None:
            self._unfinished_attempts -= 1
            match answer:
                case RolloutEnded():
                    finished.extend(answer.samples)
                    self.budget.end_rollout(group_id, len(answer.samples))
                    self.failures.record_success()
                case RolloutFailed():
                    self.budget.end_rollout(group_id, 0)
                    self.failures.record_failure(answer.reason, answer.message)
            self.on_answer(answer, problem)
            self.trainer.notify()

        try:
            await self.publisher.start_group(group_id, self.attempts, self.trainer.current_version)
            group = await run_group(
                self.scheduler, group_id, problem, self.attempts, self.seed, self.incarnation, on_answer
            )
        except asyncio.CancelledError:
            reason = TRAINING_DONE if self.trainer.done else "run_ended"
            await self.publisher.give_up_group(group_id, finished, self.attempts, reason, self.trainer.current_version)
            raise
        task = asyncio.current_task()
        assert task is not None
        self._groups.discard(task)
        self._unwritten_groups += 1
        if await self._publish(group) and self.on_published is not None:
            self.on_published(group_id, len(group.record.samples))
        self._unwritten_groups -= 1
        self.trainer.notify()

    async def _publish(self, group: FinishedGroup) -> bool:
        """Fates first, then the budget, then the group; returns whether it was written, or had nothing to write."""
        version = self.trainer.current_version
        await self.publisher.write_failures(group, version)
        # Without a wait up to `publish_group`, which writes in the order of the calls: what the record says of the
        # groups before it is behind none of them.
        self.passes.end(number_of(group.record.id))
        record = replace(group.record, epochs_done=self.passes.epochs_done)
        # Before the group is there to be read: what settles its samples may be heard while `write` still returns.
        self.budget.publish(record.id, [sample.id for sample in record.samples])
        return not record.samples or await self.publisher.publish_group(record, version)
