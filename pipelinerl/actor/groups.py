"""Runs the attempts at one problem and makes a `Group` of them. Called by the training loop, once per group.

Waits for the last attempt; every attempt ends, at the latest by its deadline, so every group does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from pipelinerl.actor.frames import RolloutEnded, RolloutFailed
from pipelinerl.actor.problems import rollout_seed
from pipelinerl.actor.scheduler import Attempt, Scheduler
from pipelinerl.domains.problem_sets import Problem
from pipelinerl.records import Group

Answer = RolloutEnded | RolloutFailed


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """All answers of a group, and the record to publish (without samples if every attempt failed)."""

    record: Group
    failures: list[RolloutFailed]


async def run_group(
    scheduler: Scheduler,
    group_id: str,
    problem: Problem,
    attempts: int,
    seed: int,
    incarnation: int,
    on_answer: Callable[[Answer], None],
) -> FinishedGroup:
    """Run `attempts` rollouts of `problem` and return the group; `on_answer` hears of each one as it ends."""

    async def attempt(index: int) -> Answer:
        answer = await scheduler.run(
            Attempt(
                rollout_id=f"{group_id}/r{index}",
                group_id=group_id,
                problem=problem,
                # Of the place in the order, not of the incarnation: a group that is run again starts as it did.
                seed=rollout_seed(seed, "train", group_id.rpartition("-")[2], index),
            )
        )
        on_answer(answer)
        return answer

    async with asyncio.TaskGroup() as running:
        tasks = [running.create_task(attempt(index)) for index in range(attempts)]
    return finish_group(group_id, problem, [task.result() for task in tasks], incarnation)


def finish_group(group_id: str, problem: Problem, answers: list[Answer], incarnation: int) -> FinishedGroup:
    """Put the answers of all attempts together, in the order of the attempts."""
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
    return FinishedGroup(record=record, failures=failures)
