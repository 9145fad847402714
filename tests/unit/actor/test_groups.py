"""Groups: their attempts, fates and passes, and an actor without a trainer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.made_up_rollouts import InstantRollouts, ended, settle

from pipelinerl.actor.budget import FixedLag, LagPolicy, SampleBudget
from pipelinerl.actor.groups import GroupRunner, Publisher, number_of
from pipelinerl.actor.problem_order import EpochCounter, ProblemOrder, rollout_seed
from pipelinerl.actor.progress import Changes, ProgressWithoutTrainer, TrainingProgress
from pipelinerl.actor.scheduler import Scheduler
from pipelinerl.actor.stats import FailureLimit, RolloutAverages, Throughput
from pipelinerl.actor.worker_messages import Answer, RolloutFailed, StartRollout
from pipelinerl.config import RunConfig
from pipelinerl.domains.user_task import Problem
from pipelinerl.errors import WorkerError
from pipelinerl.records import Group

LIMIT_S, ATTEMPTS = 60.0, 2


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


def runner_of(
    rollouts: Any, groups: Written, num_problems: int = 1, attempts: int = ATTEMPTS, max_failure_rate: float = 1.0
) -> GroupRunner:
    changes = Changes()
    progress = TrainingProgress(SampleBudget(FixedLag(4, 8), attempts), 0, changes)
    problems = [Problem(id=f"p{number}", dataset_name="d", data={}) for number in range(num_problems)]
    return GroupRunner(
        problems=ProblemOrder(problems, "seed"),
        epochs=EpochCounter(num_problems),
        attempts=attempts,
        seed=1,
        incarnation=0,
        scheduler=Scheduler(1, 4, rollouts, LIMIT_S, 0, changes),
        progress=progress,
        publisher=Publisher("actor_0", 0, groups, Written(), Written()),  # type: ignore[arg-type]
        failures=FailureLimit(max_failure_rate, 4),
        throughput=Throughput(8),
        averages=RolloutAverages(),
        heartbeat=SimpleNamespace(progress=lambda: None),  # type: ignore[arg-type]
    )


async def groups_of(
    rollouts: Any, num_problems: int, last: Callable[[Group], bool], attempts: int = ATTEMPTS
) -> tuple[list[Group], GroupRunner]:
    """Groups in the order of the stream until `last`; each is settled as soon as it is written."""

    def on_group(group: Group) -> None:
        runner.progress.budget.settle_group(group.id)
        if last(group):
            runner.progress.done = True
            runner.progress.changes.notify()

    groups = Written(on_group)
    runner = runner_of(rollouts, groups, num_problems, attempts)
    await asyncio.wait_for(runner.run(), LIMIT_S)
    return list(groups.records), runner


async def test_o3_a_group_keeps_its_good_attempts_in_order_and_seeds_follow_from_its_place() -> None:
    def answer(start: StartRollout) -> Answer:
        failed = start.rollout_id.endswith("r1")
        return RolloutFailed(0, "rollout_timeout", "") if failed else ended(start.rollout_id)

    rollouts = InstantRollouts(answer)
    groups, runner = await groups_of(rollouts, 1, lambda group: group.id == "0-1", attempts=3)
    first = groups[0]
    assert [rollout.rollout_id for rollout in first.rollouts] == ["0-0/r0", "0-0/r2"]
    assert [sample.id for sample in first.samples] == ["0-0/r0/s0", "0-0/r2/s0"]
    assert (first.problem_id, first.dataset_name, first.failed_rollouts) == ("p0", "d", 1)
    fates = [(fate.group_id, fate.fate, fate.reason, fate.num_rollouts) for fate in runner.publisher.fates.records]  # type: ignore[attr-defined]
    assert ("0-0", "pending", "started", 3) in fates and ("0-0", "failed", "rollout_timeout", 1) in fates
    seeds = {start.rollout_id: start.seed for start in rollouts.starts}
    assert seeds["0-0/r2"] == rollout_seed(1, "train", "0", 2) and seeds["0-1/r0"] == rollout_seed(1, "train", "1", 0)


async def test_d7_every_started_rollout_has_one_fate_when_training_is_done() -> None:
    groups, runner = await groups_of(InstantRollouts(), 5, lambda group: group.id == "0-7")
    settled: dict[str, int] = {group.id: len(group.rollouts) for group in groups}
    started: dict[str, int] = {}
    for fate in runner.publisher.fates.records:  # type: ignore[attr-defined]
        into = started if fate.fate == "pending" else settled
        into[fate.group_id] = into.get(fate.group_id, 0) + fate.num_rollouts
    assert started == settled and set(started.values()) == {ATTEMPTS}


async def test_a_group_that_training_leaves_is_unused_and_only_what_failed_in_it_failed() -> None:
    class OneOfEach:
        """Of three rollouts one ends, one fails, and one still runs at the end."""

        async def run(self, start: StartRollout, timeout_s: float) -> Answer:
            if start.rollout_id.endswith("r2"):
                await asyncio.Event().wait()
            return ended(start.rollout_id) if start.rollout_id.endswith("r0") else RolloutFailed(0, "bad", "")

    runner = runner_of(OneOfEach(), Written(), attempts=3)
    running = asyncio.create_task(runner.run())
    await settle()
    runner.progress.done = True
    runner.progress.changes.notify()
    await asyncio.wait_for(running, LIMIT_S)
    records = [fate for fate in runner.publisher.fates.records if fate.group_id == "0-0"]  # type: ignore[attr-defined]
    assert [(fate.fate, fate.reason, fate.num_rollouts, fate.sample_ids) for fate in records] == [
        ("pending", "started", 3, []),
        ("failed", "bad", 1, []),
        ("unused", "training_done", 2, ["0-0/r0/s0"]),
    ]


async def test_r1_too_many_failures_end_the_run_with_their_reasons() -> None:
    runner = runner_of(InstantRollouts(lambda start: RolloutFailed(0, "bad", "no")), Written(), max_failure_rate=0.5)
    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.wait_for(runner.run(), LIMIT_S)
    error: BaseException = raised.value
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, WorkerError) and "bad: 4" in str(error)


@dataclass
class Rollouts:
    """Every rollout has `num_samples`; all of place `failing` fail, those of place `slow` wait for `go_on`."""

    num_samples: int = 1
    failing: int = -1
    slow: int = -1
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, start: StartRollout, timeout_s: float) -> Answer:
        number = number_of(start.group_id)
        await (self.go_on.wait() if number == self.slow else asyncio.sleep(0))
        if number == self.failing:
            return RolloutFailed(0, "bad_reward", "no number", requests=1, retries=0)
        return ended(start.rollout_id, num_samples=self.num_samples)


def places(groups: list[Group]) -> set[int]:
    return {number_of(group.id) for group in groups}


@pytest.mark.parametrize("rollouts", [Rollouts(), Rollouts(num_samples=3), Rollouts(failing=4)])
async def test_groups_say_how_many_passes_are_done(rollouts: Rollouts) -> None:
    """Whatever the rollouts return, the group that says 1 is the first after which every problem had its turn."""
    groups, _ = await groups_of(rollouts, 5, lambda group: group.epochs_done >= 1)
    wanted = {0, 1, 2, 3, 4} - {rollouts.failing}
    ends = [number for number in range(len(groups)) if groups[number].epochs_done >= 1]
    assert wanted <= places(groups[: ends[0] + 1])
    if rollouts.failing < 0:
        assert not wanted <= places(groups[: ends[0]])


async def test_no_group_starts_after_the_last_step() -> None:
    """Its samples would be unused (`training_done`): the end of training is only heard once the weights are sent."""
    rollouts = InstantRollouts()
    runner = runner_of(rollouts, Written())
    runner.progress._last_step = 3
    runner.progress.steps_done = 3
    running = asyncio.create_task(runner.run())
    await settle()
    assert not rollouts.starts
    runner.progress.done = True
    runner.progress.changes.notify()
    await asyncio.wait_for(running, LIMIT_S)


@pytest.mark.parametrize(("finetune", "after"), [({"max_epochs": 1}, 2), ({"max_train_steps": 3}, 3)])
def test_an_actor_without_a_trainer_ends_with_the_passes_or_the_samples(finetune: dict[str, int], after: int) -> None:
    steps = {"train_batch_size": 1, "gradient_accumulation_passes": 2, **finetune}
    config = RunConfig.model_validate({"output_dir": "x", "finetune": steps})
    progress = ProgressWithoutTrainer(config, SampleBudget(LagPolicy(), 2), 0, Changes())
    for number in range(after):
        assert not progress.done
        progress.published(f"0-{number}", 2, (number + 1) / 2)
    assert progress.done
