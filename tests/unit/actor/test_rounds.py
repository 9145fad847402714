"""Rounds of generate-then-train: the arithmetic, and that actor and preprocessor never wait for each other (L7)."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from fakes.short_sample import short_sample

from pipelinerl.actor.budget import OneRound, SampleBudget
from pipelinerl.actor.progress import Changes, TrainingProgress
from pipelinerl.config import RunConfig
from pipelinerl.config.schedule import Rounds, next_update, pauses_rollouts, rounds_of, update_interval
from pipelinerl.preprocess.batcher import Batcher, Groups, num_samples
from pipelinerl.records import Group, Sample, StepDone, TrainerStarted, WeightUpdateSuccess
from pipelinerl.streams.base import Entry


def test_rounds_of_three_steps_that_end_in_the_middle_of_one() -> None:
    rounds = Rounds(steps=3, samples_per_step=10, last_step=8)
    assert [rounds.start_of(done) for done in range(9)] == [0, 0, 0, 3, 3, 3, 6, 6, 6]
    assert [rounds.steps_left(done) for done in range(9)] == [3, 2, 1, 3, 2, 1, 2, 1, 0]
    assert [rounds.target_samples(done) for done in range(9)] == [30, 30, 30, 30, 30, 30, 20, 20, 20]


def test_what_the_configuration_asks_for() -> None:
    finetune = {"train_batch_size": 2, "gradient_accumulation_passes": 8, "max_train_steps": 10}
    config = RunConfig(output_dir="x", schedule="conventional", steps_per_generation=4, finetune=finetune)
    assert rounds_of(config) == Rounds(4, 16, 10)
    assert update_interval(config) == 4 and pauses_rollouts(config)
    assert [next_update(config, done) for done in (0, 3, 4, 8, 9)] == [4, 4, 8, 10, 10]
    config = RunConfig(output_dir="x", schedule="concurrent", finetune={**finetune, "weight_update_interval": 2})
    assert rounds_of(config) is None and update_interval(config) == 2 and pauses_rollouts(config)
    assert not pauses_rollouts(RunConfig(output_dir="x"))


def ready(group_id: str, count: int, version: int = 0, offset: int = 0) -> Entry[Group]:
    samples = [short_sample(f"{group_id}/r{index}/s0", version) for index in range(count)]
    return entry_of(group_id, samples, offset)


def entry_of(group_id: str, samples: list[Sample], offset: int) -> Entry[Group]:
    group = Group(id=group_id, problem_id="p", dataset_name="d", samples=samples, rollouts=[])
    return Entry(offset, group)


def sizes(closed: Groups | None) -> list[int]:
    assert closed is not None
    return [len(group.record.samples) for group in closed]


def test_no_step_closes_before_the_whole_round_is_there() -> None:
    """Three steps of 4: eleven samples are not enough, and the twelfth closes all three."""
    batcher = Batcher(4, rounds=Rounds(3, 4, 30))
    for index in range(5):
        batcher.add(ready(f"g{index}", 2))
    batcher.add(ready("g5", 1))
    assert batcher.close_step(1) is None
    batcher.add(ready("g6", 1))
    assert [sizes(batcher.close_step(step)) for step in (1, 2, 3)] == [[2, 2], [2, 2], [2, 1, 1]]
    assert batcher.num_samples == 0 and batcher.close_step(4) is None


def test_groups_larger_than_a_step_are_shared_out_one_for_each_step() -> None:
    """Two steps of 4 have their 8 samples with one group of 10, but a step needs a group of its own."""
    batcher = Batcher(4, rounds=Rounds(2, 4, 30))
    batcher.add(ready("a", 10))
    assert batcher.close_step(1) is None
    batcher.add(ready("b", 10))
    assert [sizes(batcher.close_step(step)) for step in (1, 2)] == [[10], [10]]


def test_a_restart_in_the_middle_of_a_round_counts_the_batches_that_are_written() -> None:
    batcher = Batcher(4, rounds=Rounds(3, 4, 30), step_samples={1: 6})
    batcher.add(ready("a", 3))
    assert batcher.close_step(2) is None
    batcher.add(ready("b", 3))
    assert [sizes(batcher.close_step(step)) for step in (2, 3)] == [[3], [3]]


def known(rounds: Rounds, attempts: int) -> SampleBudget:
    budget = SampleBudget(OneRound(rounds), attempts)
    budget.observe_rollout(1)
    return budget


def publish(budget: SampleBudget, group_id: str, count: int) -> None:
    budget.publish(group_id, [f"{group_id}/r{index}/s0" for index in range(count)])


def admit_all(budget: SampleBudget, first: int = 0) -> list[str]:
    names = []
    while budget.allows_group():
        names.append(f"g{first + len(names)}")
        budget.start_group(names[-1])
    return names


def test_nothing_is_admitted_before_the_round_is_trained() -> None:
    budget = known(Rounds(2, 4, 30), attempts=2)
    names = admit_all(budget)
    assert len(names) == 4
    for name in names:
        publish(budget, name, 2)
    trainer = TrainingProgress(budget, 0, Changes())
    trainer.apply_message(StepDone(step=1, time=0, group_ids=names[:2], num_samples=4, samples_processed=4))
    assert budget.charged_samples == 4 and not budget.allows_group()
    trainer.apply_message(StepDone(step=2, time=0, group_ids=names[2:], num_samples=4, samples_processed=8))
    assert len(admit_all(budget, first=4)) == 4


def test_a_filtered_group_is_replaced_in_the_same_round() -> None:
    budget = known(Rounds(2, 4, 30), attempts=2)
    names = admit_all(budget)
    for name in names:
        publish(budget, name, 2)
    budget.settle_samples("g1", ["g1/r0/s0", "g1/r1/s0"])
    assert admit_all(budget, first=4) == ["g4"]


@dataclass
class Simulation:
    """Actor, preprocessor and trainer with the real budget and batcher, one event at a time in a random order."""

    rounds: Rounds
    attempts: int
    rng: random.Random
    keep: float
    largest_rollout: int
    incarnation: int = 0
    steps_done: int = 0
    version: int = 0
    started: int = 0
    published: list[tuple[Entry[Group], int]] = field(default_factory=list)
    batches: dict[int, Groups] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    lags: list[int] = field(default_factory=list)

    def start(self, steps_done: int) -> None:
        """A (re)start of everything from a training state behind `steps_done`, as each process does it."""
        self.steps_done = self.version = steps_done
        self.budget = SampleBudget(OneRound(self.rounds), self.attempts)
        self.budget.observe_rollout(self.largest_rollout)
        self.trainer = TrainingProgress(self.budget, self.incarnation, Changes())
        for step, closed in self.batches.items():
            done = StepDone(step=step, time=0, group_ids=[], num_samples=num_samples(closed), samples_processed=0)
            self.budget.policy.observe(done, self.budget, is_own=False)
        self.trainer.apply_message(TrainerStarted(step=steps_done, data_offset=0, time=0, incarnation=self.incarnation))
        batched = {group.record.id for closed in self.batches.values() for group in closed}
        trained = {g.record.id for step, c in self.batches.items() if step <= steps_done for g in c}
        counts = {step: num_samples(closed) for step, closed in self.batches.items()}
        steps = self.rounds.steps
        self.batcher = Batcher(self.rounds.samples_per_step, None, False, steps - 1, self.rounds, counts)
        for group, _ in self.published:
            ids = [item.id for item in group.record.samples if item.id not in self.dropped]
            if ids and group.record.id not in trained:
                self.budget.publish(group.record.id, ids)
            if ids and group.record.id not in batched:
                self.batcher.add(group)
        self.running: list[str] = []

    def moves(self) -> list[str]:
        moves = []
        if self.budget.allows_group():
            moves.append("admit")
        if self.running:
            moves.append("end")
        if self.steps_done + 1 in self.batches:
            moves.append("train")
        step = max(self.batches, default=0) + 1
        if (closed := self.batcher.close_step(step)) is not None:
            self.batches[step] = closed
            moves.append("train")
        return moves

    def run(self, until: int) -> None:
        while self.steps_done < until:
            moves = self.moves()
            assert moves, "everybody waits for somebody else"
            getattr(self, self.rng.choice(moves))()

    def admit(self) -> None:
        name = f"g{self.started}"
        self.started += 1
        self.budget.start_group(name)
        self.running.append(name)

    def end(self) -> None:
        name = self.running.pop(self.rng.randrange(len(self.running)))
        counts = [self.rng.randint(0, self.largest_rollout) for _ in range(self.attempts)]
        for count in counts:
            self.budget.end_rollout(name, count)
        group = ready(name, sum(counts), self.version)
        samples = group.record.samples
        self.budget.publish(name, [item.id for item in samples])
        kept = [item for item in samples if self.rng.random() < self.keep]
        gone = {item.id for item in samples} - {item.id for item in kept}
        self.dropped |= gone
        self.budget.settle_samples(name, gone)
        self.published.append((entry_of(name, kept, len(self.published)), self.version))
        self.batcher.add(self.published[-1][0])

    def train(self) -> None:
        step = self.steps_done + 1
        if step not in self.batches:
            return
        closed = self.batches[step]
        versions = {item.min_version for group in closed for item in group.record.samples}
        assert len(versions) == 1
        self.lags.append(step - 1 - versions.pop())
        self.steps_done = step
        if step % self.rounds.steps == 0:
            self.version = step
            self.trainer.apply_message(
                WeightUpdateSuccess(version=step, time=0, seconds={}, num_servers=1, incarnation=self.incarnation)
            )
        self.trainer.apply_message(
            StepDone(
                step=step,
                time=0,
                group_ids=[group.record.id for group in closed],
                num_samples=num_samples(closed),
                samples_processed=0,
                incarnation=self.incarnation,
            )
        )


@pytest.mark.parametrize("seed", range(60))
def test_l7_rounds_end_whatever_the_groups_are_and_the_lag_is_that_of_the_step(seed: int) -> None:
    rng = random.Random(seed)
    rounds = Rounds(rng.randint(1, 5), rng.randint(1, 12), rng.randint(6, 17))
    simulation = Simulation(rounds, rng.randint(1, 6), rng, rng.choice([0.4, 1.0]), rng.randint(1, 3))
    simulation.start(0)
    simulation.run(until=rounds.last_step)
    assert simulation.lags == [step % rounds.steps for step in range(rounds.last_step)]


@pytest.mark.parametrize("seed", range(60))
def test_l7_a_restart_from_any_training_state_ends_too(seed: int) -> None:
    """Killed anywhere and taken up from an older state: recorded batches are trained again, then rounds go on."""
    rng = random.Random(1000 + seed)
    rounds = Rounds(rng.randint(1, 5), rng.randint(1, 12), rng.randint(8, 17))
    simulation = Simulation(rounds, rng.randint(1, 6), rng, rng.choice([0.4, 1.0]), rng.randint(1, 3))
    simulation.start(0)
    killed_at = rng.randint(1, rounds.last_step - 1)
    simulation.run(until=killed_at)
    for _ in range(rng.randint(0, 6)):
        if moves := simulation.moves():
            getattr(simulation, rng.choice(moves))()
    simulation.incarnation = 1
    simulation.start(rng.randint(0, simulation.steps_done))
    simulation.run(until=rounds.last_step)
    assert max(simulation.lags) <= rounds.steps - 1
