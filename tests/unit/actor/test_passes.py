"""Passes over the problems: a slow one is waited for, a failed one had its turn, a restart stands where it stood."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from fakes.crash_run import made_up_sample
from msgspec.structs import replace

from pipelinerl.actor.admission import SampleBudget
from pipelinerl.actor.alone import AloneTrainer
from pipelinerl.actor.failures import FailureLimit
from pipelinerl.actor.frames import RolloutEnded, RolloutFailed, StartRollout
from pipelinerl.actor.passes import Passes
from pipelinerl.actor.problems import ProblemOrder
from pipelinerl.actor.publish import Publisher
from pipelinerl.actor.scheduler import Scheduler
from pipelinerl.actor.slots import ServerSlots
from pipelinerl.actor.trainer_state import TrainerState
from pipelinerl.actor.training import TrainingRollouts
from pipelinerl.config import RunConfig
from pipelinerl.domains.problem_sets import Problem
from pipelinerl.records import Group, RolloutSummary

LIMIT_S, ATTEMPTS = 60.0, 2


def test_leading_places_count() -> None:
    passes, seen = Passes(4), []
    for number in (1, 0, 3, 4, 2):
        passes.end(number)
        seen.append(passes.epochs_done)
    assert seen == [0.0, 0.5, 0.5, 0.5, 1.25]


@pytest.mark.parametrize(("due", "after", "done"), [([], 6, 1.5), ([1, 4], 6, 0.25), ([0, 1, 2, 3], 4, 0.0)])
def test_a_restart_stands_where_the_run_stood(due: list[int], after: int, done: float) -> None:
    passes = Passes(4)
    passes.resume(due, after)
    assert passes.epochs_done == done
    for number in due:
        passes.end(number)
    assert passes.epochs_done == after / 4


@dataclass
class Rollouts:
    """Workers: every rollout has `num_samples`, all of place `failing` fail, those of place `slow` wait for `go_on`."""

    num_samples: int = 1
    failing: int = -1
    slow: int = -1
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, start: StartRollout, timeout_s: float) -> RolloutEnded | RolloutFailed:
        number, index = int(start.group_id.rpartition("-")[2]), int(start.rollout_id.rpartition("r")[2])
        await (self.go_on.wait() if number == self.slow else asyncio.sleep(0))
        if number == self.failing:
            return RolloutFailed(0, "bad_reward", "no number", requests=1, retries=0)
        samples = [
            replace(made_up_sample(start.group_id, index, 0, 0, float(index)), id=f"{start.rollout_id}/s{part}")
            for part in range(self.num_samples)
        ]
        summary = RolloutSummary(
            rollout_id=start.rollout_id,
            reward=1,
            success=True,
            num_samples=self.num_samples,
            output_tokens=4,
            latency_s=1,
        )
        return RolloutEnded(0, samples, summary, None, 0, 0, requests=1, retries=0)


class Written:
    """A writer that keeps what it gets, and tells `on_write`."""

    def __init__(self, on_write: Callable[[Any], None] = lambda record: None) -> None:
        self.records: deque[Any] = deque()
        self._on_write = on_write

    async def write(self, record: Any) -> int:
        self.records.append(record)
        self._on_write(record)
        return len(self.records) - 1

    def end_waits(self) -> None:
        """Nothing waits here."""


async def groups_of(rollouts: Rollouts, num_problems: int, last: Callable[[Group], bool]) -> list[Group]:
    """Groups in the order of the stream until `last`; each is settled as soon as it is written."""
    budget = SampleBudget(4, 8, ATTEMPTS)
    trainer = TrainerState(budget, 0)

    def on_group(group: Group) -> None:
        budget.settle_group(group.id)
        if last(group):
            trainer.finish()

    groups = Written(on_group)
    slots = ServerSlots(1, 4, trainer.notify)
    problems = [Problem(id=f"p{number}", dataset_name="d", data={}) for number in range(num_problems)]
    training = TrainingRollouts(
        problems=ProblemOrder(problems, "seed"),
        passes=Passes(num_problems),
        attempts=ATTEMPTS,
        seed=0,
        incarnation=0,
        scheduler=Scheduler(slots, rollouts, LIMIT_S, 0, None),  # type: ignore[arg-type]
        slots=slots,
        budget=budget,
        failures=FailureLimit(1.0, 100),
        trainer=trainer,
        publisher=Publisher("actor_0", 0, groups, Written(), Written(), Written()),  # type: ignore[arg-type]
        on_answer=lambda answer, problem: None,
    )
    await asyncio.wait_for(training.run(), LIMIT_S)
    return list(groups.records)


def places(groups: list[Group]) -> set[int]:
    return {int(group.id.rpartition("-")[2]) for group in groups}


@pytest.mark.parametrize("rollouts", [Rollouts(), Rollouts(num_samples=3), Rollouts(failing=4)])
async def test_groups_say_how_many_passes_are_done(rollouts: Rollouts) -> None:
    """Whatever a rollout brings: the group that says 1 is the first behind which every problem had its turn."""
    groups = await groups_of(rollouts, 5, lambda group: group.epochs_done >= 1)
    wanted = {0, 1, 2, 3, 4} - {rollouts.failing}
    ends = [number for number in range(len(groups)) if groups[number].epochs_done >= 1]
    assert wanted <= places(groups[: ends[0] + 1])
    if rollouts.failing < 0:
        assert not wanted <= places(groups[: ends[0]])


async def test_a_slow_problem_is_waited_for() -> None:
    rollouts = Rollouts(slow=2)

    def last(group: Group) -> bool:
        if group.id == "0-9":
            rollouts.go_on.set()
        return group.epochs_done >= 1

    groups = await groups_of(rollouts, 5, last)
    by_id = {group.id: group.epochs_done for group in groups}
    # Nine others were done meanwhile, which are nearly two passes, but not the first one.
    assert by_id["0-9"] == 2 / 5 and by_id["0-2"] >= 2.0


def test_an_actor_alone_ends_with_the_passes() -> None:
    config = RunConfig.model_validate({"output_dir": "x", "finetune": {"max_epochs": 1}})
    trainer, passes = TrainerState(SampleBudget(4, 8, 2), 0), Passes(2)
    alone = AloneTrainer(config, SampleBudget(4, 8, 2), trainer, passes)
    passes.end(0)
    alone.published("0-0", 2)
    assert not trainer.done
    passes.end(1)
    alone.published("0-1", 0)
    assert trainer.done
