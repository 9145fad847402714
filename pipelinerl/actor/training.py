"""Starts groups for as long as training goes on, and publishes each one when its last attempt has ended.

Called by the actor's loop. Waits for a free slot and for room in the sample budget, whichever is missing.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pipelinerl.actor.admission import SampleBudget
from pipelinerl.actor.failures import FailureLimit
from pipelinerl.actor.frames import RolloutEnded, RolloutFailed
from pipelinerl.actor.groups import Answer, run_group
from pipelinerl.actor.problems import ProblemOrder
from pipelinerl.actor.publish import Publisher
from pipelinerl.actor.scheduler import Scheduler
from pipelinerl.actor.slots import ServerSlots
from pipelinerl.actor.trainer_state import TrainerState
from pipelinerl.domains.datasets import Problem
from pipelinerl.records import Sample

logger = logging.getLogger(__name__)


@dataclass
class TrainingRollouts:
    """Training rollouts of one run. `on_answer` hears of every attempt that ended, with its problem.

    `numbers` are the places in the order of problems to run; a restart sets them to what is left. `on_published` hears
    of every group that was written and of the number of its samples.
    """

    problems: ProblemOrder
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
                        self.publisher.start_group(group_id, self.attempts, self.trainer.current_version)
                        self.budget.admit(group_id)
                        self._unfinished_attempts += self.attempts
                        task = tasks.create_task(self._run_group(group_id, self.problems[number]), name=group_id)
                        self._groups.add(task)
                        task.add_done_callback(self._groups.discard)
                    await changed.wait()
            for task in self._groups:
                task.cancel()

    def _has_room(self) -> bool:
        # Attempts take their slots a moment after their group was started, so they are counted as well.
        free = self._unfinished_attempts < self.slots.total and self.slots.has_idle
        return free and self.budget.can_admit()

    @property
    def running_groups(self) -> int:
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
            group = await run_group(
                self.scheduler, group_id, problem, self.attempts, self.seed, self.incarnation, on_answer
            )
        except asyncio.CancelledError:
            reason = "training_done" if self.trainer.done else "run_ended"
            self.publisher.give_up_group(group_id, finished, self.attempts, reason, self.trainer.current_version)
            raise
        # Fate first, then the group, then the budget: nothing is acted on that is not written.
        self.publisher.publish_group(group, self.trainer.current_version)
        self.budget.publish(group_id, [sample.id for sample in group.record.samples])
        if self.on_published is not None:
            self.on_published(group_id, len(group.record.samples))
        self.trainer.notify()
